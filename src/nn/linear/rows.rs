//! A linear layer with some of its outputs, or of its inputs.

use super::outputs::{Outputs, Part};
use super::{WeightLayout, add_bias, add_bias_gradient};
use crate::nn::{BackwardPass, LayerError, Parameter};
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
pub(in crate::nn) struct LinearGradients<'a> {
    pub(super) part: WeightPart,
    pub(super) bias: Option<Part>,
    pub(super) pass: BackwardPass<'a>,
}

/// Some outputs or inputs within a weight.
#[derive(Debug, Clone, Copy)]
pub(in crate::nn) struct WeightPart {
    pub(super) weight: Parameter,
    /// Of the weight.
    pub(super) layout: WeightLayout,
    /// The layout whose outputs are `range`: transposed, if that is some inputs.
    pub(super) divided: WeightLayout,
    pub(super) range: Outputs,
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

impl LinearGradients<'_> {
    /// As [`Linear::backward_weight`](super::Linear::backward_weight).
    pub(in crate::nn) fn add(&self, dy: &Tensor, x: &Tensor) -> Result<(), LayerError> {
        let ctx = self.pass.ctx();
        let ws = ctx.workspace();
        if let Some(bias) = &self.bias {
            bias.add(|dbias| add_bias_gradient(dy, dbias, ws), ws)?;
        }
        match ctx.deferred_gradients() {
            Some(deferred) if self.pass.gradient(self.part.weight).is_some() => {
                let part = self.part;
                let add = move |grads: &[_], dy: &_, x: &_, ws: &_| part.add_product(grads, dy, x, ws);
                deferred.defer(Box::new(add), dy, x, ws)
            }
            _ => self.part.add_product(self.pass.gradients(), dy, x, ws),
        }
    }
}

impl WeightPart {
    /// Adds dyᵀ·x to this part of the weight's gradient, unless the weight is frozen. `grads` are those of the layer.
    pub(in crate::nn) fn add_product(
        self,
        grads: &[Option<Tensor>],
        dy: &Tensor,
        x: &Tensor,
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        let Some(gradient) = self.weight.gradient_in(grads) else { return Ok(()) };
        let add = |dweight: &Tensor| match self.layout {
            WeightLayout::OutIn => Ok(linear::backward_weight(dy, x, dweight)?),
            WeightLayout::InOut => Ok(linear::backward_weight(x, dy, dweight)?),
        };
        Part::new(gradient, self.divided, self.range).add(add, ws)
    }
}
