//! Resumes a run from a checkpoint.

use super::data_stream::DataStream;
use super::error::TrainerError;
use super::evaluation_tracker::EvaluationTracker;
use super::memory_checkpoints::MemoryCheckpoints;
use crate::checkpoint::{
    Checkpoint, CheckpointError, EvaluationResult, MANIFEST, Manifest, newest, open_verified, read_pointer,
    saved_steps, step_directories, step_name,
};
use crate::comm::{CommError, ProcessGroup, ProcessGroupExt, ReduceOp};
use crate::engine::{Engine, EngineError};
use crate::monitor::{CheckpointSource, counted};
use std::path::{Path, PathBuf};

/// The checkpoint to resume from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest valid checkpoint in this directory, by default the output directory. If there is none, the run starts
    /// at step 1.
    Newest(Option<PathBuf>),
    /// The checkpoint in this directory.
    From(PathBuf),
}

impl Resume {
    /// Resolves a path: a checkpoint, or an output directory with checkpoints. `None` is the run's output directory.
    ///
    /// # Errors
    /// When the directory contains no checkpoint.
    pub fn new(path: Option<PathBuf>) -> Result<Self, TrainerError> {
        let Some(path) = path else { return Ok(Self::Newest(None)) };
        let path = read_pointer(&path).unwrap_or(path);
        if path.join(MANIFEST).exists() {
            return Ok(Self::From(path));
        }
        if saved_steps(&path)?.is_empty() {
            let found = if path.exists() { "neither" } else { "nothing" };
            return Err(TrainerError::NothingToResume { path, found });
        }
        Ok(Self::Newest(Some(path)))
    }

    /// Returns whether the checkpoint is in another directory than `output`.
    pub fn is_from_elsewhere(&self, output: &Path) -> bool {
        match self {
            Self::Newest(None) => false,
            Self::Newest(Some(dir)) => !is_same_dir(dir, output),
            Self::From(checkpoint) => !is_same_dir(&checkpoint.join(".."), output),
        }
    }

    /// Returns whether a run that resumes here may save beside the checkpoints in `output`, the last of which has `newest` steps: they
    /// are its own, or none is newer than the checkpoint that it resumes.
    ///
    /// # Errors
    /// When the checkpoint cannot be read.
    pub(crate) fn may_save_beside(&self, newest: u64, output: &Path) -> Result<bool, CheckpointError> {
        let (Self::Newest(Some(dir)) | Self::From(dir)) = self else { return Ok(true) };
        let step = self.candidate(None)?.map_or(0, |checkpoint| checkpoint.manifest().progress.step);
        Ok(newest <= step || is_same_dir(dir, output))
    }

    /// Returns the checkpoint that the run will resume from if it is valid; only its manifest has been read.
    ///
    /// # Errors
    /// When the checkpoint or the directory cannot be read.
    pub fn candidate(&self, output: Option<&Path>) -> Result<Option<Checkpoint>, CheckpointError> {
        let dir = match self {
            Self::From(dir) => return Checkpoint::open(dir).map(Some),
            Self::Newest(dir) => dir.as_deref().or(output),
        };
        let Some(dir) = dir else { return Ok(None) };
        let mut checkpoints =
            step_directories(dir)?.into_iter().map(|found| Checkpoint::open(&dir.join(found.name)));
        // `newest` reports the others: those that are damaged, and those that only this run cannot read.
        Ok(checkpoints.find_map(Result::ok))
    }
}

/// The checkpoint that a run was resumed from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resumed {
    /// The id of its run, which the resumed run keeps.
    pub run_id: String,
    /// Where it was stored.
    pub source: CheckpointSource,
}

/// The checkpoint that a run resumes from.
struct Found {
    checkpoint: Checkpoint,
    source: CheckpointSource,
}

/// Returns whether two paths are the same directory.
fn is_same_dir(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// The state of a run that a checkpoint restores.
pub(super) struct Resumption<'a> {
    pub(super) engine: &'a mut Engine,
    pub(super) data: &'a mut DataStream,
    pub(super) evaluations: &'a mut EvaluationTracker,
    /// All ranks.
    pub(super) group: &'a dyn ProcessGroup,
    /// The run's own output directory.
    pub(super) output: Option<&'a Path>,
    pub(super) memory: Option<&'a MemoryCheckpoints>,
    /// Whether data that differs from the checkpoint's starts at its beginning.
    pub(super) reset_data: bool,
    pub(super) log: fn(&str),
}

impl Resumption<'_> {
    /// Restores the checkpoint of `resume`; `None` if there is none. Collective.
    pub(super) fn restore(self, resume: &Resume) -> Result<Option<Resumed>, TrainerError> {
        let Some(Found { checkpoint, source }) = self.find(resume)? else { return Ok(None) };
        let manifest = checkpoint.manifest();
        let (step, seed) = (manifest.progress.step, self.engine.config().seed);
        // The candidate that was checked before the ranks started may have been skipped.
        let mut is_reset = false;
        let samples_consumed = match self.data.data().check_resumes(&checkpoint, seed) {
            Ok(()) => manifest.progress.data.samples_consumed,
            // A restarted run has its own checkpoints with the new data.
            Err(CheckpointError::Mismatch { what, saved, wanted, .. }) if self.reset_data => {
                (self.log)(&format!(
                    "--reset-data: {what} changed from {saved} to {wanted}; the data restarts at its first sequence, training continues"
                ));
                is_reset = true;
                0
            }
            Err(error) => return Err(TrainerError::CannotResume(error)),
        };
        match self.engine.load_checkpoint(&checkpoint) {
            Err(EngineError::Checkpoint(error)) => return Err(TrainerError::CannotResume(*error)),
            loaded => loaded?,
        }
        self.data.resume(step, samples_consumed)?;
        let has_best = self.has_best(manifest)?;
        self.evaluations.restore(manifest.progress.evaluations, has_best);
        if is_reset {
            self.evaluations.restart_patience();
        }
        self.log_resumed(&checkpoint);
        Ok(Some(Resumed { run_id: manifest.run_id.clone(), source }))
    }

    /// Logs the checkpoint, and what differs from it.
    fn log_resumed(&self, checkpoint: &Checkpoint) {
        let Manifest { mesh, zero_stage, num_partitions, progress, config, .. } = checkpoint.manifest();
        let step = progress.step;
        (self.log)(&format!(
            "resumed from {}: step {step}, saved on mesh {mesh} at ZeRO stage {zero_stage} with {}",
            checkpoint.dir().display(),
            counted(*num_partitions, "partition")
        ));
        let saved_batch = config["train_batch_size"].as_u64();
        let batch = self.engine.config().train_batch_size;
        if let Some(saved) = saved_batch.filter(|saved| *saved != batch as u64) {
            (self.log)(&format!(
                "warning: the batch changed from {saved} to {batch} sequences per step over all ranks (`train_batch_size`): the \
                 learning-rate schedule and the data per step are no longer those of the saved run"
            ));
        }
        if step_dir_name(checkpoint.dir()).is_some_and(|name| name != step_name(step)) {
            (self.log)(&format!("the checkpoint's directory was renamed: its manifest says step {step}"));
        }
    }

    fn find(&self, resume: &Resume) -> Result<Option<Found>, TrainerError> {
        let on_disk = |checkpoint| Found { checkpoint, source: CheckpointSource::Disk };
        let directory = match resume {
            Resume::From(dir) => return Ok(Some(on_disk(open_verified(dir, self.group)?))),
            Resume::Newest(dir) => dir.as_deref().or(self.output).ok_or(TrainerError::NoOutput)?,
        };
        let found = newest(directory, self.group)?;
        for fault in found.refused {
            (self.log)(&format!("warning: skipped a damaged checkpoint: {fault}"));
        }
        // Checkpoints elsewhere are of a run before this job.
        let is_own = !self.output.is_some_and(|output| resume.is_from_elsewhere(output));
        if let Some(memory) = self.memory.filter(|_| is_own)
            && let Some(checkpoint) = memory.newest(self.engine, found.checkpoint.as_ref())?
        {
            return Ok(Some(Found { checkpoint, source: CheckpointSource::Memory }));
        }
        if found.checkpoint.is_none() {
            let directory = directory.display();
            (self.log)(&format!("warning: {directory} has no checkpoint to resume: starting at step 1"));
        }
        Ok(found.checkpoint.map(on_disk))
    }

    /// Returns whether the best checkpoint of the resumed run is in the output directory. Collective.
    fn has_best(&self, resumed: &Manifest) -> Result<bool, CommError> {
        let is_here = |best: EvaluationResult| {
            let found = Manifest::read(&self.output?.join(step_name(best.step))).ok()?;
            Some(found.run_id == resumed.run_id && found.progress.step == best.step)
        };
        let best = resumed.progress.evaluations.best_checkpoint.filter(|_| self.group.rank() == 0);
        let is_here = best.and_then(is_here).unwrap_or(false);
        Ok(self.group.all_reduce_values(&[i64::from(is_here)], ReduceOp::Max)?[0] == 1)
    }
}

/// Returns the name of a checkpoint's directory, if it has the form that runs use.
fn step_dir_name(dir: &Path) -> Option<&str> {
    dir.file_name()?.to_str().filter(|name| name.starts_with("step_"))
}
