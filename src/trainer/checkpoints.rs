//! Saves the checkpoints of a run.

use super::error::TrainerError;
use crate::checkpoint::{CheckpointError, SaveOptions, SavedCheckpoint, Saver};
use crate::comm::ProcessGroup;
use crate::config::{CheckpointConfig, OnSaveError, ZeroConfig};
use crate::engine::{Engine, EngineError, RunRecord};
use crate::kernels::device::DeviceKind;
use crate::monitor::format_bytes;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The checkpoints of a run, on one rank.
pub(super) struct Checkpoints {
    config: CheckpointConfig,
    saver: Saver,
    /// The newest published checkpoint.
    newest: Option<PathBuf>,
}

/// The outcome of a save.
pub(super) enum SaveOutcome {
    /// The checkpoint is published.
    Saved(SavedCheckpoint),
    /// The save failed, and the config says to continue.
    Failed {
        /// The step that was not saved.
        step: u64,
        /// The cause.
        error: CheckpointError,
    },
    /// The checkpoint is being written in the background.
    Writing,
}

impl Checkpoints {
    /// Prepares checkpoints in `output`, if the engine's config enables them. `group` contains all ranks. Collective.
    pub(super) fn new(
        engine: &Engine,
        group: &Arc<dyn ProcessGroup>,
        output: Option<&Path>,
    ) -> Result<Option<Self>, TrainerError> {
        let Some(config) = engine.config().checkpoint.clone() else { return Ok(None) };
        let output = output.ok_or(TrainerError::NoOutput)?;
        // A background save needs a copy of the state, for which there is no room if state is offloaded.
        let device = match engine.workspace().options().device.is_cpu() {
            true => DeviceKind::Cpu,
            false => DeviceKind::Cuda,
        };
        let ZeroConfig { offload_optimizer, offload_param, .. } = &engine.config().zero;
        let is_moved = [offload_optimizer, offload_param].map(|state| state.is_moved_from(device));
        let background = config.background && !is_moved.contains(&true);
        let keep_last = Some(config.keep_last).filter(|keep| *keep > 0);
        let saver = engine.saver(group.clone(), output, SaveOptions { keep_last, background })?;
        Ok(Some(Self { config: CheckpointConfig { background, ..config }, saver, newest: None }))
    }

    /// Returns whether a checkpoint is due after a step.
    pub(super) fn is_due(&self, step: u64) -> bool {
        self.config.interval.is_some_and(|interval| step.is_multiple_of(interval))
    }

    /// Returns the newest checkpoint that this run has published.
    pub(super) fn newest(&self) -> Option<PathBuf> {
        self.newest.clone()
    }

    /// Returns whether a checkpoint is being written in the background.
    pub(super) fn is_saving(&self) -> bool {
        self.saver.is_pending()
    }

    /// Returns the outcome of the previous save, if it has ended; with `waits`, after it has ended. Collective.
    pub(super) fn settle(&mut self, waits: bool) -> Result<Option<SaveOutcome>, TrainerError> {
        let saved = if waits { self.saver.finish() } else { self.saver.poll() };
        self.outcome(saved.map_err(EngineError::from), false)
    }

    /// Saves the engine, or starts to in the background. A failure of the run's last save is an error. Collective.
    pub(super) fn save(
        &mut self,
        engine: &mut Engine,
        record: RunRecord,
        is_last: bool,
    ) -> Result<Option<SaveOutcome>, TrainerError> {
        let begun = engine.save_checkpoint(&mut self.saver, record);
        if begun.is_ok() && self.config.background && self.saver.is_pending() && !is_last {
            return Ok(Some(SaveOutcome::Writing));
        }
        let saved = begun.and_then(|_| Ok(self.saver.finish()?));
        self.outcome(saved, is_last)
    }

    fn outcome(
        &mut self,
        saved: Result<Option<SavedCheckpoint>, EngineError>,
        is_last: bool,
    ) -> Result<Option<SaveOutcome>, TrainerError> {
        let goes_on = self.config.on_error == OnSaveError::Continue && !is_last;
        match saved.map_err(TrainerError::from) {
            Err(TrainerError::Checkpoint(error @ CheckpointError::NotSaved { step, .. })) if goes_on => {
                Ok(Some(SaveOutcome::Failed { step, error }))
            }
            saved => {
                let saved = saved?;
                self.newest = saved.as_ref().map(|saved| saved.path.clone()).or(self.newest.take());
                Ok(saved.map(SaveOutcome::Saved))
            }
        }
    }

    /// Describes when checkpoints are saved, and which are kept.
    pub(super) fn describe(&self) -> String {
        let CheckpointConfig { interval, keep_last, keep_best, .. } = self.config;
        let every = interval.map_or_else(String::new, |interval| format!("every {interval} steps and "));
        let kept = match keep_last {
            0 => "keeping all".to_owned(),
            keep => format!("keeping the last {keep}"),
        };
        let best = match keep_best {
            true => ", and the one with the lowest evaluation loss (`checkpoint.keep_best`)",
            false => "",
        };
        format!(
            "checkpoints: saved {every}after the last step; {kept} (`checkpoint.keep_last`, 0 keeps all){best}"
        )
    }
}

impl SaveOutcome {
    /// Returns the lines for the log.
    pub(super) fn lines(&self, step: u64) -> Vec<String> {
        match self {
            Self::Writing => vec![format!("checkpoint: writing step {step} in the background")],
            Self::Failed { error, .. } => vec![format!("warning: {error}; training continues")],
            Self::Saved(saved) => {
                let (path, size) = (saved.path.display(), format_bytes(saved.bytes as f64));
                let line = format!("checkpoint: {path}, {size} in {:.2} s", saved.seconds);
                let remarks = saved
                    .warnings
                    .iter()
                    .map(|remark| format!("warning: the checkpoint is valid, but {remark}"));
                std::iter::once(line).chain(remarks).collect()
            }
        }
    }
}
