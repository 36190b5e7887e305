//! Where a run goes on from.

use super::data_stream::DataStream;
use super::error::TrainerError;
use super::evaluation_tracker::EvaluationTracker;
use crate::checkpoint::{
    Checkpoint, CheckpointError, EvaluationResult, MANIFEST, Manifest, newest, open_verified, read_pointer,
    saved_steps, step_directories, step_name,
};
use crate::comm::{CommError, ProcessGroup, ProcessGroupExt, ReduceOp};
use crate::engine::{Engine, EngineError};
use std::path::{Path, PathBuf};

/// The checkpoint that a run goes on from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest checkpoint that verifies: of the output directory, or of the run in this one. Without any the run
    /// begins with step 1.
    Newest(Option<PathBuf>),
    /// The checkpoint in this directory.
    From(PathBuf),
}

impl Resume {
    /// By a path: a checkpoint, or an output directory that holds some. The own output directory without one.
    ///
    /// # Errors
    /// A directory that holds no checkpoint.
    pub fn new(path: Option<PathBuf>) -> Result<Self, TrainerError> {
        let Some(path) = path else { return Ok(Self::Newest(None)) };
        let path = read_pointer(&path).unwrap_or(path);
        if path.join(MANIFEST).exists() {
            return Ok(Self::From(path));
        }
        if saved_steps(&path)?.is_empty() {
            return Err(TrainerError::NothingToResume { path });
        }
        Ok(Self::Newest(Some(path)))
    }

    /// Whether the run was in another directory until now.
    pub fn is_from_elsewhere(&self, output: &Path) -> bool {
        match self {
            Self::Newest(None) => false,
            Self::Newest(Some(dir)) => !is_same_dir(dir, output),
            Self::From(checkpoint) => !is_same_dir(&checkpoint.join(".."), output),
        }
    }

    /// The checkpoint that the run will go on from, if it verifies: only its manifest has been read.
    ///
    /// # Errors
    /// A checkpoint or a directory that cannot be read.
    pub fn candidate(&self, output: Option<&Path>) -> Result<Option<Checkpoint>, CheckpointError> {
        let dir = match self {
            Self::From(dir) => return Checkpoint::open(dir).map(Some),
            Self::Newest(dir) => dir.as_deref().or(output),
        };
        let Some(dir) = dir else { return Ok(None) };
        let mut checkpoints =
            step_directories(dir)?.into_iter().map(|found| Checkpoint::open(&dir.join(found.name)));
        // Those that are damaged will be passed over, and reported.
        Ok(checkpoints.find_map(Result::ok))
    }
}

/// Whether two paths lead to one directory.
pub fn is_same_dir(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// The parts of a run that a checkpoint restores.
pub(super) struct Resumption<'a> {
    pub(super) engine: &'a mut Engine,
    pub(super) data: &'a mut DataStream,
    pub(super) evaluations: &'a mut EvaluationTracker,
    /// All ranks.
    pub(super) group: &'a dyn ProcessGroup,
    /// The run's own output directory.
    pub(super) output: Option<&'a Path>,
    /// Whether data that is not the checkpoint's is begun from its beginning.
    pub(super) reset_data: bool,
    pub(super) log: fn(&str),
}

impl Resumption<'_> {
    /// Restores the run that `resume` asks for, and returns its name; `None` where there is no checkpoint. Collective.
    pub(super) fn restore(self, resume: &Resume) -> Result<Option<String>, TrainerError> {
        let Some(checkpoint) = self.find(resume)? else { return Ok(None) };
        let manifest = checkpoint.manifest();
        let (step, seed) = (manifest.progress.step, self.engine.config().seed);
        // The one that was looked at before the ranks started may have been passed over.
        let mut is_reset = false;
        let samples_consumed = match self.data.data().check_resumes(&checkpoint, seed) {
            Ok(()) => manifest.progress.data.samples_consumed,
            // A restart finds the data that it goes on with in its own checkpoints.
            Err(CheckpointError::Mismatch { what, saved, wanted, .. }) if self.reset_data => {
                (self.log)(&format!(
                    "--reset-data: {what} was {saved} and is {wanted}: from the beginning of the data"
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
        (self.log)(&format!("resumed from {}", checkpoint.dir().display()));
        if step_dir_name(checkpoint.dir()).is_some_and(|name| name != step_name(step)) {
            (self.log)(&format!("its directory was renamed: by its manifest it is of step {step}"));
        }
        Ok(Some(manifest.run_id.clone()))
    }

    fn find(&self, resume: &Resume) -> Result<Option<Checkpoint>, TrainerError> {
        let directory = match resume {
            Resume::From(dir) => return Ok(Some(open_verified(dir, self.group)?)),
            Resume::Newest(dir) => dir.as_deref().or(self.output).ok_or(TrainerError::NoOutput)?,
        };
        let found = newest(directory, self.group)?;
        for fault in found.refused {
            (self.log)(&format!("passed over a damaged checkpoint: {fault}"));
        }
        if found.checkpoint.is_none() {
            let directory = directory.display();
            (self.log)(&format!("{directory} has no checkpoint to resume: starting at step 1"));
        }
        Ok(found.checkpoint)
    }

    /// Whether the best checkpoint up to the one that the run goes on from is in the output directory. Collective.
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

/// The name of a checkpoint's directory, if it is one that a run gives.
fn step_dir_name(dir: &Path) -> Option<&str> {
    dir.file_name()?.to_str().filter(|name| name.starts_with("step_"))
}
