//! Checks of the checkpoint to resume, and of the output directory, before anything is written.

use super::error::{JobError, OrJobError};
use crate::checkpoint::{CheckpointError, MANIFEST, StepDirectory, step_directories};
use crate::config::Config;
use crate::trainer::{Resume, TrainerError, TrainingData, is_same_dir};
use std::path::{Path, PathBuf};

/// Resolves the value of the flag.
pub(super) fn open_resume(dir: Option<PathBuf>) -> Result<Resume, JobError> {
    Resume::new(dir).map_err(|error| match error {
        error @ TrainerError::NothingToResume { .. } => JobError::usage(format!("--resume {error}")),
        error => JobError::usage(error),
    })
}

/// Rejects mixing the checkpoints of two runs in one directory.
pub(super) fn check_output(config: &Config, resume: Option<&Resume>) -> Result<(), JobError> {
    let refuse = |message: String| Err(JobError::usage(message));
    let Some(output) = config.ulysses.output.as_deref() else {
        return match resume {
            Some(Resume::Newest(None)) => refuse(
                "--resume needs an output directory: give --output or `ulysses.output`, or a checkpoint such as \
                 --resume DIR/step_00000100"
                    .to_owned(),
            ),
            _ => Ok(()),
        };
    };
    if Path::new(output).join(MANIFEST).exists() {
        return refuse(format!(
            "--output {output}: expected a directory for the run's checkpoints, found a checkpoint"
        ));
    }
    let directories = step_directories(Path::new(output)).or_usage()?;
    let Some(StepDirectory { step: newest, name: newest_name }) = directories.into_iter().next() else {
        return Ok(());
    };
    match resume {
        None => refuse(format!(
            "{output} contains checkpoints of an earlier run, up to {newest_name}: resume with --resume, or start a new \
             run with another --output"
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
                "{output} contains {newest_name}, which is newer than {}: give another --output, or move it away",
                dir.display()
            ))
        }
    }
}

/// Rejects resuming with other data.
pub(super) fn check_candidate(
    resume: Option<&Resume>,
    config: &Config,
    data: &TrainingData,
) -> Result<(), JobError> {
    let candidate = resume
        .map(|resume| resume.candidate(config.ulysses.output.as_deref().map(Path::new)))
        .transpose()
        .or_usage()?;
    let Some(checkpoint) = candidate.flatten() else { return Ok(()) };
    const HINT: &str = "a run resumes with the same `ulysses.data`, `ulysses.seq_len`, `ulysses.packing`, `ulysses.validation` and \
                        seed. For longer sequences use `ulysses.seq_len_schedule`; for other data use --reset-data; to start a new \
                        run from its parameters, export the checkpoint and pass it as --model";
    let is_dir = |path: &&String| Path::new(path).is_dir();
    let directory = config.ulysses.data.iter().map(|source| &source.path).find(is_dir);
    let added = directory.map_or(String::new(), |dir| {
        format!(". {dir} is a directory: all text files in it are data, also a log file that was added")
    });
    let named = |cause: CheckpointError| format!("{cause}: {HINT}{added}");
    data.check_resumes(&checkpoint, config.seed).map_err(named).or_usage()
}
