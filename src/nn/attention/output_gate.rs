//! The gate of the attention's output (arXiv 2505.06708): `σ(gate) · out`, element by element.
//!
//! The projection of the queries has the gate as well: the queries of each head, then its gate. The gate stays with its
//! tokens, so the exchange does not send it.

use crate::nn::{ForwardPass, LayerError};
use candle_core::Tensor;
use ulysses_kernels::glu::{self, Activation::Sigmoid};

/// A gate, with the gradient of the gated output.
pub(super) struct GatedOutput {
    pub(super) gate: Tensor,
    pub(super) dgated: Tensor,
}

/// The gated output.
pub(super) fn apply(gate: &Tensor, out: &Tensor, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
    let gated = pass.workspace().alloc(out.dims())?;
    glu::forward(Sigmoid, gate, out, &gated)?;
    Ok(gated)
}

impl GatedOutput {
    /// The gradient of the output.
    pub(super) fn dout(&self, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
        apply(&self.gate, &self.dgated, pass)
    }

    /// The gradient of the gate. `scratch` has the size of `out`, and is recycled with all else.
    pub(super) fn dgate(
        self,
        out: &Tensor,
        scratch: Tensor,
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let Self { gate, dgated } = self;
        let dgate = pass.workspace().alloc(out.dims())?;
        glu::backward(Sigmoid, &dgated, &gate, out, &dgate, &scratch)?;
        pass.recycle([gate, dgated, scratch]);
        Ok(dgate)
    }
}
