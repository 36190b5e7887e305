//! The backward pass.

use super::forward::{Loss, Tape, head_views};
use super::{Engine, EngineError};
use crate::comm::{ProcessGroupExt, ReduceOp};
use crate::config::LossNormalization;
use crate::model::{HeadSaved, LayerContext, Saved};
use candle_core::Tensor;

impl Engine {
    /// Adds the gradients of a micro batch. Each unit's are reduced while the next one's
    /// backward runs. Collective. The first call after a step forgets the gradients of the last.
    ///
    /// # Errors
    /// More calls than the accumulation allows, or failed communication.
    pub fn backward(&mut self, loss: Loss) -> Result<(), EngineError> {
        let accumulation = self.config.gradient_accumulation_steps;
        if self.accumulation.micro_steps == accumulation {
            return Err(EngineError::StepDue { accumulation });
        }
        if self.accumulation.micro_steps == 0 {
            self.zero.zero_gradients()?;
        }
        let boundary = self.accumulation.micro_steps + 1 == accumulation;
        let seq_len = loss.tape.seq_len;
        let (scale, weight) = self.loss_scale(&loss, seq_len)?;
        self.accumulation.add(&loss, seq_len, weight);

        let Tape { ctx, input_ids, labels, inputs, saved, hidden, head, .. } = loss.tape;
        let mut dx = self.backward_head(head, &labels, scale, &ctx)?;
        self.workspace.give(hidden);
        if !self.model.is_tied() {
            self.zero.reduce(self.head_unit(), boundary)?;
        }
        for (index, (x, state)) in inputs.into_iter().zip(saved).enumerate().rev() {
            dx = self.backward_layer(index, x, state, dx, &ctx)?;
            self.zero.reduce(index + 1, boundary)?;
        }
        let grads = self.zero.gradients(0)?;
        self.model.embedding.backward(&input_ids, &dx, &grads[0])?;
        self.workspace.give(dx);
        self.zero.reduce(0, boundary)?;
        self.zero.finish_reductions()?;
        self.accumulation.micro_steps += 1;
        Ok(())
    }

    /// Backward of the loss and the head. The views end here, or they would keep the head's
    /// whole parameters and gradients through the backward of all layers.
    fn backward_head(
        &mut self,
        saved: HeadSaved,
        labels: &[i64],
        scale: f32,
        ctx: &LayerContext,
    ) -> Result<Tensor, EngineError> {
        let (unit, tied) = (self.head_unit(), self.model.is_tied());
        let params = self.zero.parameters(unit)?;
        let grads = self.zero.gradients(unit)?;
        let num_layers = self.model.layers.len();
        if num_layers > 0 {
            self.zero.prefetch(num_layers)?;
        }
        let (params, grads) = (head_views(&params, tied), head_views(&grads, tied));
        let dx = self.model.head.backward(params, saved, labels, scale, grads, ctx)?;
        self.zero.release(unit);
        Ok(dx)
    }

    /// Backward of one layer, after its forward once more where its state was dropped.
    fn backward_layer(
        &mut self,
        index: usize,
        x: Tensor,
        state: Option<Saved>,
        dy: Tensor,
        ctx: &LayerContext,
    ) -> Result<Tensor, EngineError> {
        let unit = index + 1;
        let params = self.zero.parameters(unit)?;
        let grads = self.zero.gradients(unit)?;
        if index > 0 {
            self.zero.prefetch(unit - 1)?;
        }
        let layer = &self.model.layers[index];
        let state = match state {
            Some(state) => state,
            None => {
                let (y, state) = layer.forward(&params, &x, ctx)?;
                self.workspace.give(y);
                state
            }
        };
        let dx = layer.backward(&params, state, dy, &grads, ctx)?;
        self.workspace.give(x);
        self.zero.release(unit);
        Ok(dx)
    }

    /// The factor that this micro batch's gradient gets now, and the one that its loss gets
    /// in the step's report.
    ///
    /// `global`: the constant `1/C`; what is missing follows in `step`. `micro_batch`: the
    /// mean over the sp group's valid tokens, then over dp and accumulation (DeepSpeed's).
    fn loss_scale(&self, loss: &Loss, seq_len: usize) -> Result<(f32, f64), EngineError> {
        match self.config.loss_normalization {
            LossNormalization::Global => {
                let constant = (self.config.train_batch_size * seq_len) as f64;
                Ok(((1.0 / constant) as f32, 1.0))
            }
            LossNormalization::MicroBatch => {
                let valid =
                    self.groups.sp.all_reduce_values(&[loss.valid_tokens() as f64], ReduceOp::Sum)?[0];
                let micro_batches = self.config.dp_size * self.config.gradient_accumulation_steps;
                let scale = if valid > 0.0 { 1.0 / (valid * micro_batches as f64) } else { 0.0 };
                Ok((scale as f32, scale))
            }
        }
    }
}
