//! The part of a model that one stage has, with its boundaries.

use super::Neighbors;
use crate::comm::Pending;
use crate::model::Model;
use crate::nn::{InputLayer, LayerContext, LayerError, LocalBatch, ParameterSpec, Saved};
use crate::objective::{Losses, Objective};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::device::dry;

/// Keeps the `layers` of a model that a stage has: the first stage also has the input, the last one the objective. Other stages
/// get boundaries without parameters, which exchange hidden states of `hidden_size` elements per token.
pub fn stage_model(
    model: Model,
    layers: Range<usize>,
    hidden_size: usize,
    neighbors: &Arc<Neighbors>,
) -> Model {
    let Model { input, layers: all, objective } = model;
    let (stage, last) = (neighbors.stage(), neighbors.num_stages() - 1);
    let boundary = |neighbor| Boundary { neighbors: neighbors.clone(), neighbor, hidden_size };
    Model {
        input: if stage == 0 { input } else { Box::new(FromPrevious(boundary(stage - 1))) },
        layers: all.into_iter().skip(layers.start).take(layers.len()).collect(),
        objective: if stage == last { objective } else { Box::new(ToNext(boundary(stage + 1))) },
    }
}

/// A boundary between this stage and a neighbor.
struct Boundary {
    neighbors: Arc<Neighbors>,
    neighbor: usize,
    hidden_size: usize,
}

/// The input of a stage that is not the first: hidden states from the previous stage.
struct FromPrevious(Boundary);

impl InputLayer for FromPrevious {
    fn name(&self) -> &str {
        "previous stage"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &[]
    }

    fn hidden_size(&self) -> Option<usize> {
        Some(self.0.hidden_size)
    }

    fn forward(
        &self,
        _: &[Tensor],
        batch: &LocalBatch<'_>,
        _: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError> {
        let Boundary { neighbors, neighbor, hidden_size } = &self.0;
        let x = neighbors.receive((batch.batch_size, batch.seq_len_local, *hidden_size), *neighbor)?;
        Ok((x, Saved::new((), 0)))
    }

    fn backward(
        &self,
        _: Saved,
        dx: &Tensor,
        _: &[Option<Tensor>],
        _: &LayerContext,
    ) -> Result<(), LayerError> {
        self.0.neighbors.send(dx, self.0.neighbor)
    }

    fn keeps_gradient(&self) -> bool {
        true
    }
}

/// The objective of a stage that is not the last: hidden states to the next stage, which knows the loss.
struct ToNext(Boundary);

/// The last stage counts the terms of the loss. In a dry run every stage does, as all tokens have a label there, or the step would
/// update nothing.
fn no_terms(batch: &LocalBatch<'_>) -> Result<Losses, LayerError> {
    match dry::is_dry() {
        false => Ok(Losses::default()),
        true => {
            let none = ulysses_kernels::tensor::zeros(0, DType::F32, &Device::Cpu)?;
            Ok(Losses::from_tensor(none, batch.num_tokens() as u64))
        }
    }
}

/// The hidden states on their way.
struct Sending {
    pending: Pending,
    dims: (usize, usize, usize),
}

impl Objective for ToNext {
    fn name(&self) -> &str {
        "next stage"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &[]
    }

    fn forward(
        &self,
        _: &[Tensor],
        x: &Tensor,
        batch: &LocalBatch<'_>,
        _: &LayerContext,
    ) -> Result<(Losses, Saved), LayerError> {
        let pending = self.0.neighbors.start_send(x, self.0.neighbor)?;
        Ok((no_terms(batch)?, Saved::new(Sending { pending, dims: x.dims3()? }, 0)))
    }

    /// The scale is in what the next stage sends.
    fn backward(
        &self,
        _: &[Tensor],
        saved: Saved,
        _: f32,
        _: &[Option<Tensor>],
        _: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let Sending { pending, dims } = saved.downcast(self.name())?;
        let dx = self.0.neighbors.receive(dims, self.0.neighbor)?;
        // Received before the gradient was computed.
        pending.wait().map_err(|error| LayerError::Exchange(error.into()))?;
        Ok(dx)
    }

    fn evaluate(
        &self,
        _: &[Tensor],
        x: Tensor,
        batch: &LocalBatch<'_>,
        _: &LayerContext,
    ) -> Result<Losses, LayerError> {
        self.0.neighbors.send(&x, self.0.neighbor)?;
        no_terms(batch)
    }

    /// Sends the hidden states, for the output of the last stage.
    fn output(&self, _: &[Tensor], x: &Tensor, _: &LayerContext) -> Result<Tensor, LayerError> {
        self.0.neighbors.send(x, self.0.neighbor)?;
        Ok(x.clone())
    }
}
