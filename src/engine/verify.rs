//! Running one global batch and looking at everything it makes.

use super::{Engine, EngineError, StepReport};
use crate::data::{GlobalBatch, MicroBatch};
use candle_core::Tensor;

/// What a global batch does to a model, assembled over the mesh: the same on all ranks, and
/// the same for every mesh.
#[derive(Debug)]
pub struct BatchOutcome {
    /// Logits before the first step, `[batch, seq, vocab]`.
    pub logits: Tensor,
    /// Loss before the first step.
    pub loss: f64,
    /// Gradients of the first step by parameter name, normalised and unclipped.
    pub gradients: Vec<(String, Tensor)>,
    /// Reports of the optimizer steps.
    pub reports: Vec<StepReport>,
    /// Parameters after the last step, by name.
    pub parameters: Vec<(String, Tensor)>,
}

impl Engine {
    /// Runs `batch` forward and backward and takes `steps` optimizer steps on it. Collective.
    ///
    /// # Errors
    /// A batch whose rows the config's batch sizes do not make up, or whatever a step reports.
    pub fn run_global_batch(
        &mut self,
        batch: &GlobalBatch,
        steps: usize,
    ) -> Result<BatchOutcome, EngineError> {
        let micro_batches = self.micro_batches(batch)?;
        let mut logits = Vec::new();
        for micro_batch in &micro_batches {
            let local = self.logits(micro_batch)?;
            logits.push(self.assemble_tokens(&local)?);
        }
        let logits = Tensor::cat(&logits, 0)?;
        self.accumulate(&micro_batches)?;
        let loss = self.global_loss()?;
        let gradients = self.gather_gradients()?;
        let mut reports = Vec::new();
        for step in 0..steps {
            if step > 0 {
                self.accumulate(&micro_batches)?;
            }
            reports.extend(self.step()?);
        }
        self.zero_grad();
        let parameters = self.gather_parameters()?;
        Ok(BatchOutcome { logits, loss, gradients, reports, parameters })
    }

    fn accumulate(&mut self, micro_batches: &[MicroBatch]) -> Result<(), EngineError> {
        for micro_batch in micro_batches {
            let loss = self.forward(micro_batch)?;
            self.backward(loss)?;
        }
        Ok(())
    }

    /// This rank's shards: micro step `a` of dp rank `d` takes rows `(a·dp + d)·micro_batch` on.
    fn micro_batches(&self, batch: &GlobalBatch) -> Result<Vec<MicroBatch>, EngineError> {
        let (got, expected) = (batch.batch(), self.config.train_batch_size);
        if got != expected {
            return Err(EngineError::MicroBatch {
                what: "the number of rows of its global batch",
                got,
                expected,
            });
        }
        let rows = self.config.micro_batch_size;
        let (sp_size, sp_rank) = (self.groups.sp.world_size(), self.groups.sp.rank());
        let take = |micro_step: usize| {
            let first = (micro_step * self.config.mesh.dp_size + self.groups.dp.rank()) * rows;
            Ok(batch.micro_batch(first..first + rows, sp_size, sp_rank)?)
        };
        (0..self.config.gradient_accumulation_steps).map(take).collect()
    }
}
