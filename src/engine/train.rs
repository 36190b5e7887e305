//! One global batch at a time.

use super::times::StepPhase;
use super::{Engine, EngineError, StepReport};
use crate::data::{DataError, DataLoader, Dataset, LoaderOptions, MicroBatch, Placement};
use std::error::Error;

impl Engine {
    /// This rank's loader of `data`: seed and batch sizes are the config's, the place is the engine's on the mesh.
    /// (What DeepSpeed's `deepspeed_io` is to its engine.)
    ///
    /// # Errors
    /// Rows of fewer tokens than there are sp ranks.
    pub fn data_loader(&self, data: impl Into<Dataset>) -> Result<DataLoader, DataError> {
        let (dp, sp) = (&self.groups.dp, &self.groups.sp);
        let options = LoaderOptions {
            seed: self.config.seed,
            micro_batch: self.config.micro_batch_size,
            accumulation: self.config.gradient_accumulation_steps,
            placement: Placement {
                dp_size: dp.world_size(),
                dp_rank: dp.rank(),
                sp_size: sp.world_size(),
                sp_rank: sp.rank(),
            },
        };
        DataLoader::new(data, options)
    }

    /// Trains on one global batch: `gradient_accumulation_steps` micro batches from
    /// `next_micro_batch` (fewer when `backward` has begun the step), then the update.
    ///
    /// # Errors
    /// A micro batch that cannot be had, or whatever a step reports.
    pub fn train_batch<E: Into<Box<dyn Error + Send + Sync>>>(
        &mut self,
        mut next_micro_batch: impl FnMut() -> Result<MicroBatch, E>,
    ) -> Result<StepReport, EngineError> {
        let accumulation = self.config.gradient_accumulation_steps;
        let done = self.accumulation.micro_steps;
        for _ in done..accumulation {
            let batch = next_micro_batch().map_err(|error| EngineError::Source(error.into()))?;
            let loss = self.timed(StepPhase::Forward, |engine| engine.forward(&batch))?;
            self.timed(StepPhase::Backward, |engine| engine.backward(loss))?;
        }
        self.timed(StepPhase::Update, Self::step)?.ok_or(EngineError::NotAtBoundary { accumulation, done })
    }
}
