//! A linear layer with some of its outputs, or of its inputs.

use super::outputs::Part;
use super::{WeightLayout, add_bias, add_bias_gradient};
use crate::nn::LayerError;
use candle_core::Tensor;
use ulysses_kernels::{Workspace, linear};

/// The weights of some outputs or inputs.
pub(in crate::nn) struct LinearRows {
    /// `[out, in]`, or as the layout says.
    pub(super) weight: Tensor,
    pub(super) layout: WeightLayout,
    /// `[out]`
    pub(super) bias: Option<Tensor>,
}

/// The gradients of [`LinearRows`], unless they are frozen.
pub(in crate::nn) struct LinearGradients {
    pub(super) weight: Option<Part>,
    pub(super) layout: WeightLayout,
    pub(super) bias: Option<Part>,
}

impl LinearRows {
    /// As [`Linear::forward`](super::Linear::forward).
    pub(in crate::nn) fn forward(
        &self,
        x: &Tensor,
        y: &Tensor,
        accumulate: bool,
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        if let Some(bias) = &self.bias {
            // The product is added to the bias, not the bias to the product, so that 16-bit elements are rounded
            // once.
            add_bias(bias, y, accumulate, ws)?;
        }
        let accumulate = accumulate || self.bias.is_some();
        match self.layout {
            WeightLayout::OutIn => Ok(linear::forward(x, &self.weight, y, accumulate)?),
            WeightLayout::InOut => Ok(linear::backward_input(x, &self.weight, y, accumulate)?),
        }
    }

    /// As [`Linear::backward_input`](super::Linear::backward_input).
    pub(in crate::nn) fn backward_input(
        &self,
        dy: &Tensor,
        dx: &Tensor,
        accumulate: bool,
    ) -> Result<(), LayerError> {
        match self.layout {
            WeightLayout::OutIn => Ok(linear::backward_input(dy, &self.weight, dx, accumulate)?),
            WeightLayout::InOut => Ok(linear::forward(dy, &self.weight, dx, accumulate)?),
        }
    }
}

impl LinearGradients {
    /// As [`Linear::backward_weight`](super::Linear::backward_weight).
    pub(in crate::nn) fn add(&self, dy: &Tensor, x: &Tensor, ws: &Workspace) -> Result<(), LayerError> {
        if let Some(bias) = &self.bias {
            bias.add(|dbias| add_bias_gradient(dy, dbias, ws), ws)?;
        }
        let Some(weight) = &self.weight else { return Ok(()) };
        let add = |dweight: &Tensor| match self.layout {
            WeightLayout::OutIn => Ok(linear::backward_weight(dy, x, dweight)?),
            WeightLayout::InOut => Ok(linear::backward_weight(x, dy, dweight)?),
        };
        weight.add(add, ws)
    }
}
