//! Runs one global batch and returns all results, for checks.

use super::{Engine, EngineError, StepReport};
use crate::data::{GlobalBatch, MicroBatch};
use candle_core::Tensor;

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
        for micro_batch in micro_batches {
            let loss = self.forward(micro_batch)?;
            self.backward(loss)?;
        }
        Ok(())
    }
}
