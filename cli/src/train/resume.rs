//! Where a run goes on from.

use super::feed::{Phase, phase_of_last};
use crate::{Failure, OrFail};
use anyhow::anyhow;
use std::path::{Path, PathBuf};
use ulysses::checkpoint::{
    Checkpoint, CheckpointError, MANIFEST, StepDirectory, pointed_to, step_directories, steps,
};
use ulysses::config::Config;

/// What `--resume` asks for.
pub(super) enum Resume {
    /// The newest checkpoint that verifies: of the output directory, or of the run in this one.
    Newest(Option<PathBuf>),
    /// The checkpoint in this directory.
    From(PathBuf),
}

impl Resume {
    /// What the flag's value means, if it has one.
    pub(super) fn new(dir: Option<PathBuf>) -> Result<Self, Failure> {
        let Some(dir) = dir else { return Ok(Self::Newest(None)) };
        let dir = pointed_to(&dir).unwrap_or(dir);
        if dir.join(MANIFEST).exists() {
            return Ok(Self::From(dir));
        }
        if steps(&dir).or_usage()?.is_empty() {
            let message = "neither a checkpoint nor an output directory that holds one";
            return Err(Failure::Usage(anyhow!("--resume {}: {message}", dir.display())));
        }
        Ok(Self::Newest(Some(dir)))
    }

    /// Whether the run was in another directory until now.
    pub(super) fn is_from_elsewhere(&self, output: &Path) -> bool {
        match self {
            Self::Newest(None) => false,
            Self::Newest(Some(dir)) => !is_same_dir(dir, output),
            Self::From(checkpoint) => !is_same_dir(&checkpoint.join(".."), output),
        }
    }

    /// The checkpoint that the run will go on from, if it verifies: only its manifest has been read.
    fn candidate(&self, output: Option<&str>) -> Result<Option<Checkpoint>, CheckpointError> {
        let dir = match self {
            Self::From(dir) => return Checkpoint::open(dir).map(Some),
            Self::Newest(dir) => dir.as_deref().or(output.map(Path::new)),
        };
        let Some(dir) = dir else { return Ok(None) };
        let mut checkpoints =
            step_directories(dir)?.into_iter().map(|found| Checkpoint::open(&dir.join(found.name)));
        // Those that are damaged will be passed over, and reported.
        Ok(checkpoints.find_map(Result::ok))
    }
}

/// Refuses to mix the checkpoints of two runs in one directory, before anything is written.
pub(super) fn check_output(config: &Config, resume: Option<&Resume>) -> Result<(), Failure> {
    let refuse = |message: String| Err(Failure::Usage(anyhow!(message)));
    let Some(output) = config.ulysses.output.as_deref() else {
        return match resume {
            Some(Resume::Newest(None)) => refuse(
                "--resume looks into the output directory: name it with --output or in the config, or give a \
                 checkpoint as --resume DIR/step_00000100"
                    .to_owned(),
            ),
            _ => Ok(()),
        };
    };
    if Path::new(output).join(MANIFEST).exists() {
        return refuse(format!(
            "--output {output}: this is a checkpoint; name the directory that a run's checkpoints lie in, or \
             another one"
        ));
    }
    let directories = step_directories(Path::new(output)).or_usage()?;
    let Some(StepDirectory { step: newest, name: newest_name }) = directories.into_iter().next() else {
        return Ok(());
    };
    match resume {
        None => refuse(format!(
            "{output} holds checkpoints of an earlier run, up to {newest_name}: --resume goes on from them, another \
             --output starts anew"
        )),
        Some(Resume::Newest(None)) => Ok(()),
        Some(resume @ (Resume::Newest(Some(dir)) | Resume::From(dir))) => {
            let candidate = resume.candidate(None).or_usage()?;
            let step = candidate.map_or(0, |checkpoint| checkpoint.manifest().progress.step);
            let is_same = is_same_dir(dir, Path::new(output));
            if newest <= step || is_same {
                return Ok(());
            }
            refuse(format!(
                "{output} holds {newest_name}, which is newer than {}: give another --output, or move it away",
                dir.display()
            ))
        }
    }
}

fn is_same_dir(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Refuses to go on with other samples, before anything is written.
pub(super) fn check_candidate(
    resume: Option<&Resume>,
    config: &Config,
    phases: &[Phase],
) -> Result<(), Failure> {
    let candidate =
        resume.map(|resume| resume.candidate(config.ulysses.output.as_deref())).transpose().or_usage()?;
    let Some(checkpoint) = candidate.flatten() else { return Ok(()) };
    const HINT: &str = "a run resumes with its `ulysses.data`, `ulysses.packing`, `ulysses.validation` and seed; to go on \
                        with longer rows give `ulysses.seq_len_schedule`; to go on with other data from its beginning, \
                        --reset-data; to start anew from its parameters, export the checkpoint and give it as --model";
    check_data(&checkpoint, config.seed, phases).map_err(|cause| anyhow!("{cause}: {HINT}")).or_usage()
}

/// A cursor means something only in the same samples in the same order.
pub(super) fn check_data(
    checkpoint: &Checkpoint,
    seed: u64,
    phases: &[Phase],
) -> Result<(), CheckpointError> {
    let progress = &checkpoint.manifest().progress;
    let saved = progress.data;
    let here = phases[phase_of_last(phases, progress.step)].cursor(seed, saved.samples_consumed);
    let hash = |hash: Option<u64>| hash.map_or_else(|| "not known".to_owned(), |hash| format!("{hash:016x}"));
    // Checkpoints of earlier versions have no hash.
    let saved_hash = saved.data_hash.or(here.data_hash);
    let number = |what, saved: u64, here: u64| (what, saved.to_string(), here.to_string());
    let facts = [
        number("`seed` (--seed)", saved.seed, here.seed),
        number("`ulysses.seq_len` (--seq-len)", saved.seq_len as u64, here.seq_len as u64),
        number(
            "the number of rows that data, packing and held-out data make",
            saved.num_rows as u64,
            here.num_rows as u64,
        ),
        ("the hash of data, packing and weights", hash(saved_hash), hash(here.data_hash)),
    ];
    match facts.into_iter().find(|(_, saved, here)| saved != here) {
        None => Ok(()),
        Some((what, saved, here)) => Err(CheckpointError::Mismatch {
            path: checkpoint.dir().to_owned(),
            what: what.to_owned(),
            saved,
            wanted: here,
        }),
    }
}
