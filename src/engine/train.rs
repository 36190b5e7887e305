//! Training on whole global batches.

use super::flops::document_cost;
use super::times::StepPhase;
use super::{Engine, EngineError, StepReport};
use crate::data::{
    DataError, DataLoader, DataRank, Dataset, DocumentCost, GlobalBatch, LoaderOptions, MicroBatch,
};
use candle_core::Tensor;
use std::error::Error;

/// The results of a global batch, assembled over the mesh: the same on all ranks and for every mesh.
#[derive(Debug)]
pub struct BatchOutcome {
    /// Logits before the first step, `[batch, seq, vocab]`.
    pub logits: Tensor,
    /// Loss before the first step.
    pub loss: f64,
    /// Gradients of the first step by parameter name, normalized and unclipped.
    pub gradients: Vec<(String, Tensor)>,
    /// Loss scale of the first step; 1 unless the precision is fp16.
    pub loss_scale: f64,
    /// Reports of the optimizer steps.
    pub reports: Vec<StepReport>,
    /// Parameters after the last step, by name.
    pub parameters: Vec<(String, Tensor)>,
}

impl Engine {
    /// Creates this rank's loader of `data`, with the config's seed and batch sizes and the engine's
    /// coordinates on the mesh. (The counterpart of DeepSpeed's `deepspeed_io`.)
    ///
    /// # Errors
    /// Sequences of fewer tokens than there are sp ranks.
    pub fn data_loader(&self, data: impl Into<Dataset>) -> Result<DataLoader, DataError> {
        let options = LoaderOptions {
            seed: self.config.seed,
            micro_batch: self.config.micro_batch_size,
            accumulation: self.config.gradient_accumulation_steps,
            rank: self.data_rank(),
        };
        let loader = DataLoader::new(data, options)?;
        Ok(match self.document_cost() {
            Some(cost) => loader.balanced(cost),
            None => loader,
        })
    }

    /// The coordinates of this rank on the axes that split the data.
    pub fn data_rank(&self) -> DataRank {
        let (dp, sp) = (&self.groups.dp, &self.groups.sp);
        DataRank {
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
        let DataRank { dp_size, dp_rank, sharding, sp_rank } = self.data_rank();
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
    /// An error of `next_micro_batch`, or any error of a step. With the schedule `zero_bubble` of a pipeline, either may leave
    /// gradients incomplete: the engine then refuses further steps until a checkpoint is loaded.
    pub fn train_batch<E: Into<Box<dyn Error + Send + Sync>>>(
        &mut self,
        mut next_micro_batch: impl FnMut() -> Result<MicroBatch, E>,
    ) -> Result<StepReport, EngineError> {
        self.run_micro_batches(|| next_micro_batch().map_err(|error| EngineError::Source(error.into())))?;
        let (accumulation, done) = (self.micro_steps_per_step(), self.accumulation.micro_steps());
        self.timed(StepPhase::Update, Self::step)?.ok_or(EngineError::NotAtBoundary { accumulation, done })
    }

    /// Returns the FLOPs of a document in a forward and backward pass of the model, without recomputation, by its length;
    /// `None` unless `ulysses.flexible_sp` divides documents among the ranks by them.
    pub fn document_cost(&self) -> Option<DocumentCost> {
        self.config.ulysses.flexible_sp.then(|| document_cost(&self.model))
    }

    /// Runs `batch` forward and backward and takes `steps` optimizer steps on it. Collective.
    ///
    /// # Errors
    /// A batch that the config's batch sizes do not divide, or any error of a step.
    pub fn run_global_batch(
        &mut self,
        batch: &GlobalBatch,
        steps: usize,
    ) -> Result<BatchOutcome, EngineError> {
        let micro_batches = self.shard(batch)?;
        let mut logits = Vec::new();
        for micro_batch in &micro_batches {
            let local = self.logits(micro_batch)?;
            logits.push(self.assemble_tokens(&local)?);
        }
        let logits = Tensor::cat(&logits, 0)?;
        self.accumulate(&micro_batches)?;
        let loss = self.global_loss()?;
        let gradients = self.gather_gradients()?;
        let (loss_scale, mut reports) = (self.scaler.scale(), Vec::new());
        for step in 0..steps {
            if step > 0 {
                self.accumulate(&micro_batches)?;
            }
            reports.extend(self.step()?);
        }
        self.zero_grad();
        let parameters = self.gather_parameters()?;
        Ok(BatchOutcome { logits, loss, gradients, loss_scale, reports, parameters })
    }

    fn accumulate(&mut self, micro_batches: &[MicroBatch]) -> Result<(), EngineError> {
        let mut rest = micro_batches.iter();
        let accumulation = micro_batches.len();
        let missing = || EngineError::NotAtBoundary { accumulation, done: accumulation };
        self.run_micro_batches(|| rest.next().cloned().ok_or_else(missing))
    }
}
