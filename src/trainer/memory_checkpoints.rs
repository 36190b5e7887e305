//! Copies of the checkpoint in host memory, for restarts.

use super::error::TrainerError;
use crate::checkpoint::{Checkpoint, CheckpointError, MemoryCheckpoint, MemoryCopies, NewestCopy};
use crate::comm::ProcessGroup;
use crate::engine::{Engine, RunRecord};
use crate::monitor::{counted, format_bytes};
use std::path::Path;
use std::sync::Arc;

/// The copies of a run in memory, on one rank.
pub(super) struct MemoryCheckpoints {
    interval: u64,
    copies: MemoryCopies,
    has_logged: bool,
    log: fn(&str),
}

impl MemoryCheckpoints {
    /// Opens the copies, if the config wants them and every rank has a directory for them. Collective.
    pub(super) fn new(
        engine: &Engine,
        group: &Arc<dyn ProcessGroup>,
        directory: Option<&Path>,
        log: fn(&str),
    ) -> Result<Option<Self>, TrainerError> {
        let interval = engine.config().checkpoint.as_ref().and_then(|checkpoint| checkpoint.memory_interval);
        let Some(interval) = interval else { return Ok(None) };
        let Some(copies) = engine.memory_copies(group.clone(), directory)? else {
            log(
                "warning: checkpoint.memory_interval has no effect: copies in memory need `ulysses launch --max-restarts K` on \
                 every node",
            );
            return Ok(None);
        };
        Ok(Some(Self { interval, copies, has_logged: false, log }))
    }

    /// Returns whether a copy is due after a step.
    pub(super) fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.interval)
    }

    /// Makes a copy. A failed one is logged, and the run continues: the copy before is still there. Collective.
    pub(super) fn copy(&mut self, engine: &mut Engine, record: RunRecord) -> Result<(), TrainerError> {
        let nodes = self.copies.num_nodes();
        match engine.copy_to_memory(&mut self.copies, record).map_err(TrainerError::from) {
            Ok(saved) => {
                let (step, bytes, seconds) = (saved.step, saved.bytes, saved.seconds);
                tracing::debug!(step, bytes, seconds, "copy in memory");
                if !std::mem::replace(&mut self.has_logged, true) {
                    (self.log)(&format!(
                        "copy in memory: step {step}, {} in {seconds:.2} s, on {}; then every \
                         {} steps",
                        format_bytes(bytes as f64),
                        counted(nodes, "node"),
                        self.interval
                    ));
                }
                saved
                    .warnings
                    .iter()
                    .for_each(|warning| (self.log)(&format!("warning: copy in memory: {warning}")));
                Ok(())
            }
            Err(TrainerError::Checkpoint(CheckpointError::NotSaved { step, rank, reason })) => {
                (self.log)(&format!(
                    "warning: copy in memory: step {step} was not copied: rank {rank}: {reason}; training continues"
                ));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the newest complete copy that is newer than `on_disk`, the newest checkpoint on disk. Collective.
    pub(super) fn newest(
        &self,
        engine: &Engine,
        on_disk: Option<&Checkpoint>,
    ) -> Result<Option<Checkpoint>, TrainerError> {
        let NewestCopy { checkpoint, refused } = self.copies.newest()?;
        refused.iter().for_each(|reason| (self.log)(&format!("warning: ignored a copy in memory: {reason}")));
        let Some(found) = checkpoint.filter(|found| self.is_wanted(found, on_disk)) else { return Ok(None) };
        let step = found.manifest().progress.step;
        match engine.gather_from_memory(&self.copies, found).map_err(TrainerError::from) {
            Ok(checkpoint) => {
                let disk = on_disk.map_or_else(
                    || "none".to_owned(),
                    |disk| format!("step {}", disk.manifest().progress.step),
                );
                (self.log)(&format!(
                    "resuming from the copy of step {step} in memory; newest on disk: {disk}"
                ));
                Ok(Some(checkpoint))
            }
            Err(TrainerError::Checkpoint(CheckpointError::Refused { rank, reason })) => {
                (self.log)(&format!(
                    "warning: ignored the copy of step {step} in memory: rank {rank}: {reason}"
                ));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn is_wanted(&self, found: &MemoryCheckpoint, on_disk: Option<&Checkpoint>) -> bool {
        let Some(disk) = on_disk.map(Checkpoint::manifest) else { return true };
        let (copy, step) = (found.manifest(), found.manifest().progress.step);
        if copy.run_id != disk.run_id {
            let (own, other) = (&disk.run_id, &copy.run_id);
            (self.log)(&format!(
                "warning: ignored the copy of step {step} in memory: it belongs to run {other}, this run is {own}"
            ));
            return false;
        }
        step > disk.progress.step
    }
}
