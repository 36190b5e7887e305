//! The projection from hidden states to logits, and its gradients.

use crate::OpError;
use crate::arg_check::{ArgCheck, Argument};
use candle_core::{DType, Tensor};

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
