//! Hidden states, labels and the projection between them, and the gradients.

use super::{Labels, LogitTiles, Sizes, check_labels};
use crate::OpError;
use crate::arg_check::{ArgCheck, Argument, RowSizes};
use candle_core::{DType, Tensor};

/// Inputs of both directions.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    pub(super) x: &'a Tensor,
    pub(super) projection: Projection<'a>,
    pub(super) labels: &'a Labels,
}

/// Outputs of the backward pass.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    pub(super) dx: &'a Tensor,
    pub(super) projection: ProjectionGradients<'a>,
}

impl<'a> Operands<'a> {
    /// Hidden states `x: [n, d]` and `labels: [n]`.
    pub fn new(x: &'a Tensor, projection: impl Into<Projection<'a>>, labels: &'a Labels) -> Self {
        Self { x, projection: projection.into(), labels }
    }

    /// The tensors as arguments.
    pub(super) fn named(&self) -> Vec<Argument<'a>> {
        self.projection.with([("x", self.x)])
    }

    pub(super) fn check(&self, call: ArgCheck, tiles: LogitTiles) -> Result<Sizes, OpError> {
        let LogitTiles { tokens: tile_tokens, softcap, is_slice } = tiles;
        let RowSizes { count: tokens, width: dim } = call.rows(("x", self.x))?;
        let vocab_size = self.projection.check(call, dim)?;
        call.expect_tokens("labels", self.labels.len(), tokens)?;
        call.expect_value("tile_tokens", tile_tokens as f64, tile_tokens > 0, "at least 1")?;
        check_labels(call, self.labels, vocab_size, is_slice)?;
        Ok(Sizes { tokens, dim, vocab_size, tile_tokens, softcap, is_slice })
    }
}

impl<'a> Gradients<'a> {
    /// `dx: [n, d]` is overwritten, those of the projection are added to.
    pub fn new(dx: &'a Tensor, projection: impl Into<ProjectionGradients<'a>>) -> Self {
        Self { dx, projection: projection.into() }
    }
}

/// The projection from hidden states to logits: `logits = x·Wᵀ + b`.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// `[vocab, d]`
    pub weight: &'a Tensor,
    /// `[vocab]`, of the same element type; `None` without one.
    pub bias: Option<&'a Tensor>,
}

/// The gradients of a projection, f32, to which [`backward`](super::backward) adds; `None` for what is frozen. Both may be parts of
/// one tensor.
#[derive(Clone, Copy, Debug)]
pub struct ProjectionGradients<'a> {
    /// `[vocab, d]`
    pub weight: Option<&'a Tensor>,
    /// `[vocab]`
    pub bias: Option<&'a Tensor>,
}

impl<'a> From<&'a Tensor> for Projection<'a> {
    fn from(weight: &'a Tensor) -> Self {
        Self { weight, bias: None }
    }
}

impl<'a, W: Into<Option<&'a Tensor>>> From<W> for ProjectionGradients<'a> {
    fn from(weight: W) -> Self {
        Self { weight: weight.into(), bias: None }
    }
}

impl<'a> Projection<'a> {
    /// The arguments, with `others` before them.
    pub(super) fn with<const N: usize>(self, others: [Argument<'a>; N]) -> Vec<Argument<'a>> {
        let bias = self.bias.map(|bias| ("bias", bias));
        others.into_iter().chain([("weight", self.weight)]).chain(bias).collect()
    }

    /// Checks the shapes, for hidden states of `dim` elements, and returns the number of classes.
    pub(super) fn check(self, call: ArgCheck, dim: usize) -> Result<usize, OpError> {
        let vocab_size = call.rows(("weight", self.weight))?.count;
        call.expect(("weight", self.weight), &[vocab_size, dim])?;
        self.bias.map_or(Ok(()), |bias| call.expect(("bias", bias), &[vocab_size]))?;
        Ok(vocab_size)
    }

    /// Bytes of a copy of the bias in f32, which a CPU needs if its elements have 16 bits.
    pub(super) fn widened_bytes(self) -> usize {
        match self.bias {
            Some(bias) if bias.dtype() != DType::F32 => bias.elem_count() * size_of::<f32>(),
            _ => 0,
        }
    }
}

impl<'a> ProjectionGradients<'a> {
    pub(super) fn weight_argument(self) -> Option<Argument<'a>> {
        self.weight.map(|weight| ("dweight", weight))
    }

    pub(super) fn bias_argument(self) -> Option<Argument<'a>> {
        self.bias.map(|bias| ("dbias", bias))
    }
}
