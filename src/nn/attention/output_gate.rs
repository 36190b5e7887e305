//! The gate of the attention's output (arXiv 2505.06708): `σ(gate) · out`, element by element.
//!
//! The projection of the queries has the gate as well: the queries of each head, then its gate. The gate stays with its
//! tokens, so the exchange does not send it.

use crate::nn::{ForwardPass, LayerError};
use candle_core::Tensor;
use ulysses_kernels::glu::{self, Activation::Sigmoid};
use ulysses_kernels::strided_copy::{BlockCopy, StridedBlock, copy_blocks};

/// A gate, with the gradient of the gated output.
pub(super) struct GatedOutput {
    pub(super) gate: Tensor,
    pub(super) dgated: Tensor,
}

/// Splits `[batch, seq_local, heads, 2 · head_dim]` into queries and gate, and recycles it.
pub(super) fn split(joint: Tensor, pass: &ForwardPass<'_>) -> Result<[Tensor; 2], LayerError> {
    let (batch, tokens, heads, width) = joint.dims4()?;
    let half = || pass.workspace().alloc((batch, tokens, heads, width / 2));
    let parts = [half()?, half()?];
    let copy = |(part, half)| BlockCopy { from: half, to: packed(part, &parts[part]), accumulate: false };
    copy_blocks(&[&joint], &[&parts[0], &parts[1]], &halves(&joint).map(copy))?;
    pass.recycle([joint]);
    Ok(parts)
}

/// The inverse of [`split`].
pub(super) fn join(parts: [Tensor; 2], pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
    let (batch, tokens, heads, head_dim) = parts[0].dims4()?;
    let joint = pass.workspace().alloc((batch, tokens, heads, 2 * head_dim))?;
    let copy = |(part, half)| BlockCopy { from: packed(part, &parts[part]), to: half, accumulate: false };
    copy_blocks(&[&parts[0], &parts[1]], &[&joint], &halves(&joint).map(copy))?;
    pass.recycle(parts);
    Ok(joint)
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

/// The two halves of every head, each with its index.
fn halves(joint: &Tensor) -> [(usize, StridedBlock); 2] {
    let width = joint.dims().last().copied().unwrap_or_default();
    let rows = joint.elem_count() / width.max(1);
    let run = width / 2;
    [0, 1].map(|part| {
        let offset = part * run;
        (part, StridedBlock { tensor: 0, offset, batch: 1, batch_stride: 0, rows, row_stride: width, run })
    })
}

/// All of a half, as rows.
fn packed(tensor: usize, half: &Tensor) -> StridedBlock {
    let run = half.dims().last().copied().unwrap_or_default();
    let rows = half.elem_count() / run.max(1);
    StridedBlock { tensor, offset: 0, batch: 1, batch_stride: 0, rows, row_stride: run, run }
}
