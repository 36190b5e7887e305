//! The part of a model that one rank has, with the boundaries of its stages.

use super::Neighbors;
use super::neighbors::Message;
use crate::model::Model;
use crate::nn::{InputLayer, LayerContext, LayerError, LocalBatch, ParameterSpec, Saved};
use crate::objective::{Losses, Objective};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::device::dry;

/// The part of a model that one rank has: the layers of its stages, one stage after the other, the input on the first rank, the
/// objective on the last one.
///
/// Boundaries without parameters, which exchange hidden states, replace input and objective of other stages.
pub struct RankModel {
    /// All layers, with the input of the rank's first and the objective of its last stage.
    pub model: Model,
    /// The input of the first rank's later stages.
    pub later_input: Option<Box<dyn InputLayer>>,
    /// The objective of the last rank's earlier stages.
    pub earlier_objective: Option<Box<dyn Objective>>,
}

/// Returns the part of a model that a rank has. `layers` are those of its stages; hidden states have `hidden_size` elements per token.
pub fn rank_model(
    model: Model,
    layers: &[Range<usize>],
    hidden_size: usize,
    neighbors: &Arc<Neighbors>,
) -> RankModel {
    let Model { input, layers: all, objective } = model;
    let (rank, ranks) = (neighbors.rank(), neighbors.num_ranks());
    let boundary = |rank| Boundary { neighbors: neighbors.clone(), rank, hidden_size };
    let previous = || Box::new(FromPrevious(boundary((rank + ranks - 1) % ranks)));
    let next = || Box::new(ToNext(boundary((rank + 1) % ranks)));
    let (is_first, is_last, has_several) = (rank == 0, rank + 1 == ranks, layers.len() > 1);
    let is_own = |layer: usize| layers.iter().any(|layers| layers.contains(&layer));
    RankModel {
        model: Model {
            input: if is_first { input } else { previous() },
            layers: (0..).zip(all).filter(|(layer, _)| is_own(*layer)).map(|(_, layer)| layer).collect(),
            objective: if is_last { objective } else { next() },
        },
        later_input: (is_first && has_several).then(|| previous() as Box<dyn InputLayer>),
        earlier_objective: (is_last && has_several).then(|| next() as Box<dyn Objective>),
    }
}

/// A boundary between a stage of this rank and one of another.
struct Boundary {
    neighbors: Arc<Neighbors>,
    /// The other rank.
    rank: usize,
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
        let Boundary { neighbors, rank, hidden_size } = &self.0;
        let x = neighbors.receive((batch.batch_size, batch.seq_len_local, *hidden_size), *rank)?;
        Ok((x, Saved::new((), 0)))
    }

    fn backward(
        &self,
        _: Saved,
        dx: &Tensor,
        _: &[Option<Tensor>],
        _: &LayerContext,
    ) -> Result<(), LayerError> {
        self.0.neighbors.send(dx, self.0.rank);
        Ok(())
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
    message: Message,
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
        let sending = Sending { message: self.0.neighbors.start_send(x, self.0.rank), dims: x.dims3()? };
        Ok((no_terms(batch)?, Saved::new(sending, 0)))
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
        let Sending { message, dims } = saved.downcast(self.name())?;
        let dx = self.0.neighbors.receive(dims, self.0.rank)?;
        // Received before the gradient was computed.
        message.wait().map_err(|error| LayerError::Exchange(error.into()))?;
        Ok(dx)
    }

    fn evaluate(
        &self,
        _: &[Tensor],
        x: Tensor,
        batch: &LocalBatch<'_>,
        _: &LayerContext,
    ) -> Result<Losses, LayerError> {
        self.0.neighbors.send(&x, self.0.rank);
        no_terms(batch)
    }

    /// Sends the hidden states, for the output of the last stage.
    fn output(&self, _: &[Tensor], x: &Tensor, _: &LayerContext) -> Result<Tensor, LayerError> {
        self.0.neighbors.send(x, self.0.rank);
        Ok(x.clone())
    }
}
