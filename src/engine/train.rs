//! Training on whole global batches.

use super::times::StepPhase;
use super::{Engine, EngineError, StepReport};
use crate::data::{DataError, DataLoader, Dataset, GlobalBatch, LoaderOptions, MicroBatch, Placement};
use std::error::Error;

impl Engine {
    /// Creates this rank's loader of `data`, with the config's seed and batch sizes and the engine's
    /// placement on the mesh. (The counterpart of DeepSpeed's `deepspeed_io`.)
    ///
    /// # Errors
    /// Sequences of fewer tokens than there are sp ranks.
    pub fn data_loader(&self, data: impl Into<Dataset>) -> Result<DataLoader, DataError> {
        let options = LoaderOptions {
            seed: self.config.seed,
            micro_batch: self.config.micro_batch_size,
            accumulation: self.config.gradient_accumulation_steps,
            placement: self.placement(),
        };
        let loader = DataLoader::new(data, options)?;
        Ok(match self.document_cost() {
            Some(cost) => loader.balanced(cost),
            None => loader,
        })
    }

    /// This rank's placement on the mesh, for the data loader.
    pub fn placement(&self) -> Placement {
        let (dp, sp) = (&self.groups.dp, &self.groups.sp);
        Placement {
            dp_size: dp.world_size(),
            dp_rank: dp.rank(),
            sharding: self.config.seq_sharding(),
            sp_rank: sp.rank(),
        }
    }

    /// Returns this rank's part of a global batch: its tokens of its sequences, as one micro batch per
    /// micro step. Micro step `a` of dp rank `d` takes the sequences from `(a·dp + d)·micro_batch` on.
    ///
    /// ```text
    /// let mut parts = engine.shard(&batch)?.into_iter();
    /// engine.train_batch(|| parts.next().ok_or("the batch has all micro batches of a step"))?;
    /// ```
    ///
    /// # Errors
    /// A batch that does not have the config's `train_batch_size` sequences, or fewer tokens than sp ranks.
    pub fn shard(&self, batch: &GlobalBatch) -> Result<Vec<MicroBatch>, EngineError> {
        let (got, expected) = (batch.batch_size(), self.config.train_batch_size);
        if got != expected {
            let what = "the number of sequences of its global batch";
            return Err(EngineError::MicroBatch { what, got, expected });
        }
        let Placement { dp_size, dp_rank, sharding, sp_rank } = self.placement();
        let size = self.config.micro_batch_size;
        let part = |micro_step: usize| {
            let first = (micro_step * dp_size + dp_rank) * size;
            Ok(batch.micro_batch(first..first + size, sharding, sp_rank)?)
        };
        (0..self.config.gradient_accumulation_steps).map(part).collect()
    }

    /// Trains on one global batch: `gradient_accumulation_steps` micro batches from `next_micro_batch`
    /// (fewer if `backward` has begun the step), or those of its [`FlexibleStep`](crate::data::FlexibleStep), then the update.
    ///
    /// # Errors
    /// An error of `next_micro_batch`, or any error of a step.
    pub fn train_batch<E: Into<Box<dyn Error + Send + Sync>>>(
        &mut self,
        mut next_micro_batch: impl FnMut() -> Result<MicroBatch, E>,
    ) -> Result<StepReport, EngineError> {
        // Known once the first micro batch went backward.
        while self.accumulation.micro_steps < self.micro_steps_per_step() {
            let batch = next_micro_batch().map_err(|error| EngineError::Source(error.into()))?;
            let loss = self.timed(StepPhase::Forward, |engine| engine.forward(&batch))?;
            self.timed(StepPhase::Backward, |engine| engine.backward(loss))?;
        }
        let (accumulation, done) = (self.micro_steps_per_step(), self.accumulation.micro_steps);
        self.timed(StepPhase::Update, Self::step)?.ok_or(EngineError::NotAtBoundary { accumulation, done })
    }
}
