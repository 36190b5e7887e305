//! The backward pass.

use super::engine::layer_unit;
use super::forward::{LayerTape, Loss, Tape};
use super::offload::{ActivationOffload, OffloadedTensor};
use super::step_part::StepPart;
use super::{Engine, EngineError};
use crate::comm::{ProcessGroupExt, ReduceOp};
use crate::config::LossNormalization;
use crate::nn::{DeferredGradients, LayerContext, LayerError, Saved};
use candle_core::Tensor;
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::lm_head_loss::Losses;

/// Gradients of a chunk of layers that a later pass computes.
#[derive(Default)]
pub(crate) struct DeferredChunk {
    chunk: usize,
    /// Whether the chunk's gradients are complete after them.
    boundary: bool,
    /// The deferred gradients of each layer, the last one first.
    layers: Vec<Arc<DeferredGradients>>,
}

impl DeferredChunk {
    /// The context for the backward pass of the next layer.
    fn next_layer(&mut self, ctx: &LayerContext) -> LayerContext {
        let layer = Arc::new(DeferredGradients::default());
        self.layers.push(layer.clone());
        ctx.clone().with_deferred_gradients(layer)
    }
}

impl Engine {
    /// Adds the gradients of a micro batch. Each unit's gradients are reduced while the backward pass of
    /// the next one runs. Collective. The first call after a step clears the gradients of the previous step.
    ///
    /// # Errors
    /// More calls than the accumulation allows, or failed communication.
    pub fn backward(&mut self, loss: Loss) -> Result<(), EngineError> {
        let Loss { mut local, tapes } = loss;
        tapes.into_iter().rev().try_for_each(|tape| self.backward_chunk(&mut local, tape, None))
    }

    /// As [`backward`](Self::backward) of one chunk, but leaves the products for gradients of weights to
    /// [`backward_weights`](Self::backward_weights), which must take the micro batches of a chunk in the same order.
    pub(crate) fn backward_input(&mut self, loss: Loss) -> Result<DeferredChunk, EngineError> {
        let Loss { mut local, mut tapes } = loss;
        let (Some(tape), true) = (tapes.pop(), tapes.is_empty()) else { unreachable!("of one chunk") };
        let mut deferred = DeferredChunk { chunk: tape.chunk, ..DeferredChunk::default() };
        self.backward_chunk(&mut local, tape, Some(&mut deferred))?;
        Ok(deferred)
    }

    /// Runs the backward pass of a chunk of layers. Takes the losses of the last one.
    fn backward_chunk(
        &mut self,
        local: &mut Losses,
        tape: Tape,
        deferred: Option<&mut DeferredChunk>,
    ) -> Result<(), EngineError> {
        self.check_usable()?;
        let (chunk, accumulation) = (tape.chunk, self.micro_steps_per_step());
        if self.accumulation.backward_passes(chunk) == accumulation {
            return Err(EngineError::StepDue { accumulation });
        }
        if tape.step != self.attempted_steps {
            let (made, now) = (tape.step, self.attempted_steps);
            return Err(EngineError::StaleLoss { made, now });
        }
        if self.accumulation.is_new() {
            self.zero.zero_gradients()?;
            self.accumulation.begin(tape.flexible);
        }
        self.accumulation.check(tape.flexible)?;
        let accumulation = self.micro_steps_per_step();
        // Cleared at the end: a failure in between leaves partial gradients behind.
        self.is_broken = true;
        let (scale, weight) = self.gradient_factor(local)?;
        if chunk + 1 == self.num_chunks() {
            self.accumulation.add(std::mem::take(local), tape.batch_hash, tape.tokens, weight);
        }
        let boundary = self.accumulation.backward_passes(chunk) + 1 == accumulation;
        self.backward_pass(tape, scale, boundary, deferred)?;
        self.accumulation.count_backward_pass(chunk);
        self.is_broken = false;
        Ok(())
    }

    /// Runs the backward pass of objective, layers and input of a chunk. At the `boundary`, its gradients are complete.
    fn backward_pass(
        &mut self,
        tape: Tape,
        scale: f32,
        boundary: bool,
        mut deferred: Option<&mut DeferredChunk>,
    ) -> Result<(), EngineError> {
        let Tape { chunk, ctx, input, mut layers, hidden, objective, .. } = tape;
        let first = self.layers_of(chunk).start;
        self.read_ahead(layers.last())?;
        let mut dx = self.backward_objective(chunk, objective, scale, &ctx)?;
        if let (_, Some(unit)) = self.objective_of(chunk)
            && !self.model.is_tied()
        {
            self.zero.reduce(unit, boundary)?;
        }
        let mut output = Some(hidden);
        while let Some(layer_tape) = layers.pop() {
            let index = first + layers.len();
            // A layer's saved state may hold its output. A checkpointed layer's output is recycled at
            // once.
            let output_in_use = matches!(layer_tape, LayerTape::State(..)).then(|| output.take()).flatten();
            output.take().into_iter().for_each(|y| self.workspace.recycle(y));
            self.begin_part(StepPart::Backward { layer: self.layer_number(index) });
            self.read_ahead(layers.last())?;
            let defers = self.model.layers[index].defers_gradients();
            let own = deferred.as_mut().map(|deferred| deferred.next_layer(&ctx)).filter(|_| defers);
            let (gradient, x) =
                self.backward_layer(chunk, index, layer_tape, dx, own.as_ref().unwrap_or(&ctx))?;
            (dx, output) = (gradient, Some(x));
            output_in_use.into_iter().for_each(|y| self.workspace.recycle(y));
            if deferred.is_none() {
                self.zero.reduce(layer_unit(index), boundary)?;
            }
        }
        self.begin_part(StepPart::EmbeddingBackward);
        let unit = self.input_of(chunk).1;
        let grads = unit.map_or(Ok(Vec::new()), |unit| self.zero.gradients(unit))?;
        let (of_chunk, _) = self.input_of(chunk);
        tracing::trace_span!("embedding backward")
            .in_scope(|| of_chunk.backward(input, &dx, &grads[..of_chunk.parameters().len()], &ctx))?;
        let dx = Some(dx).filter(|_| !of_chunk.keeps_gradient());
        self.flush_messages()?;
        [dx, output].into_iter().flatten().for_each(|tensor| self.workspace.recycle(tensor));
        unit.map_or(Ok(()), |unit| self.zero.reduce(unit, boundary))?;
        match deferred {
            None => self.end_backward(chunk, boundary),
            Some(deferred) => {
                deferred.boundary = boundary;
                Ok(self.zero.finish_reductions()?)
            }
        }
    }

    /// Adds the gradients that [`backward_input`](Self::backward_input) has left, and reduces them.
    pub(crate) fn backward_weights(&mut self, deferred: DeferredChunk) -> Result<(), EngineError> {
        self.check_usable()?;
        self.is_broken = true;
        let DeferredChunk { chunk, boundary, layers } = deferred;
        for (index, layer) in self.layers_of(chunk).rev().zip(layers) {
            self.begin_part(StepPart::WeightBackward { layer: self.layer_number(index) });
            self.add_deferred(index, &layer)?;
            self.zero.reduce(layer_unit(index), boundary)?;
        }
        self.flush_messages()?;
        self.end_backward(chunk, boundary)?;
        self.is_broken = false;
        Ok(())
    }

    fn add_deferred(&mut self, index: usize, layer: &DeferredGradients) -> Result<(), EngineError> {
        let _layer = tracing::trace_span!("layer weight gradients", layer = index).entered();
        let grads = self.zero.gradients(layer_unit(index))?;
        Ok(layer.add_to(&grads, &self.workspace)?)
    }

    /// Completes the reductions of a chunk. At the `boundary`, its gradients are complete.
    fn end_backward(&mut self, chunk: usize, boundary: bool) -> Result<(), EngineError> {
        self.zero.finish_reductions()?;
        if boundary && chunk == 0 {
            // Here, after all messages: the stages that share parameters wait for each other.
            self.zero.sum_tied_gradients()?;
        }
        Ok(())
    }

    /// Backward of a chunk's objective. The views are dropped here. Otherwise they would keep its full parameters and
    /// gradients alive through the backward pass of all layers.
    fn backward_objective(
        &mut self,
        chunk: usize,
        saved: Saved,
        scale: f32,
        ctx: &LayerContext,
    ) -> Result<Tensor, EngineError> {
        let _head = tracing::trace_span!("head backward").entered();
        let unit = self.objective_of(chunk).1;
        let params = unit.map_or(Ok(Vec::new()), |unit| self.zero.parameters(unit))?;
        let grads = unit.map_or(Ok(Vec::new()), |unit| self.zero.gradients(unit))?;
        let layers = self.layers_of(chunk);
        if !layers.is_empty() {
            self.zero.prefetch(layer_unit(layers.end - 1))?;
        }
        if layers.len() > 1 {
            self.zero.read_ahead(layer_unit(layers.end - 2))?;
        }
        let (params, grads) = match unit {
            Some(_) => (self.model.objective_views(params), self.model.objective_views(grads)),
            None => (params, grads),
        };
        let dx = self.objective_of(chunk).0.backward(&params, saved, scale, &grads, &ctx.of_own_tokens())?;
        unit.into_iter().for_each(|unit| self.zero.release(unit));
        Ok(dx)
    }

    /// Starts to load what the backward pass of the next layer needs.
    fn read_ahead(&self, layer_tape: Option<&LayerTape>) -> Result<(), EngineError> {
        match (&self.activation_offload, layer_tape) {
            (Some(store), Some(LayerTape::Offloaded(stored))) => store.read_ahead(stored, &self.workspace),
            _ => Ok(()),
        }
    }

    /// Backward of one layer from its tape: the gradient of its input, and the input.
    fn backward_layer(
        &mut self,
        chunk: usize,
        index: usize,
        layer_tape: LayerTape,
        dy: Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Tensor), EngineError> {
        let _layer = tracing::trace_span!("layer backward", layer = index).entered();
        let unit = layer_unit(index);
        let params = self.zero.parameters(unit)?;
        let grads = self.zero.gradients(unit)?;
        let first = self.layers_of(chunk).start;
        if index > first {
            self.zero.prefetch(layer_unit(index - 1))?;
            // The embedding's parameters are not needed in its backward.
            if index > first + 1 {
                self.zero.read_ahead(layer_unit(index - 2))?;
            }
        }
        let layer = &self.model.layers[index];
        let checkpoint = match layer_tape {
            LayerTape::State(x, saved) => {
                let dx = layer.backward(&params, saved, dy, &grads, ctx)?;
                self.zero.release(unit);
                return Ok((dx, x));
            }
            LayerTape::Checkpoint(tensors) => tensors,
            LayerTape::Offloaded(stored) => load(self.activation_offload.as_ref(), stored, &self.workspace)?,
        };
        let foreign = || LayerError::ForeignSavedState { layer: layer.name().to_owned() };
        let x = checkpoint.first().ok_or_else(foreign)?.clone();
        let dx = layer.backward_checkpointed(&params, checkpoint, dy, &grads, ctx)?;
        self.zero.release(unit);
        Ok((dx, x))
    }

    /// The factor for this micro batch's gradient, and the weight of its loss in the step's report.
    ///
    /// With `global`, the factor is the constant `1/C`; `step` supplies the rest. With `micro_batch`, it is
    /// the mean over the valid tokens of the ranks with parts of the same sequences, then over dp and accumulation (as in DeepSpeed). The
    /// gradient's factor also contains the loss scale.
    fn gradient_factor(&self, local: &Losses) -> Result<(f32, f64), EngineError> {
        match self.config.loss_normalization {
            LossNormalization::Global => Ok(((self.scaler.scale() / self.loss_constant()) as f32, 1.0)),
            LossNormalization::MicroBatch => {
                let valid =
                    self.groups.tokens().all_reduce_values(&[local.valid_tokens() as f64], ReduceOp::Sum)?[0];
                let micro_batches = self.config.mesh.dp_size * self.config.gradient_accumulation_steps;
                let scale = if valid > 0.0 { 1.0 / (valid * micro_batches as f64) } else { 0.0 };
                Ok(((scale * self.scaler.scale()) as f32, scale))
            }
        }
    }
}

/// Loads an offloaded checkpoint into memory.
fn load(
    store: Option<&ActivationOffload>,
    stored: Vec<OffloadedTensor>,
    workspace: &Workspace,
) -> Result<Vec<Tensor>, EngineError> {
    let Some(store) = store else { return Ok(Vec::new()) };
    stored.into_iter().map(|stored| store.load(stored, workspace)).collect()
}
