//! The launches of `cuda/attention_sink.cu`.

use super::LseSizes;
use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::ATTENTION_SINK};
use crate::elementwise::add_blocks;
use candle_core::{DType, Tensor};

/// Tokens that a block sums: `kTokens` of the kernels.
const TOKENS: usize = 2048;

pub(super) fn forward(
    launcher: &Launcher,
    sinks: &Tensor,
    o: &Tensor,
    lse: &Tensor,
    LseSizes { batch, heads, tokens }: LseSizes,
    head_dim: usize,
) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&ATTENTION_SINK, "attention_sink_forward", sinks.dtype())?;
    let rows = batch * heads * tokens;
    launcher.open([o, lse], [sinks], |[o, lse], [sinks]| {
        let sizes = [tokens, heads, head_dim].map(|size| (size as u32).into());
        let args = [&[o.into(), lse.into(), sinks.into(), (rows as u64).into()], &sizes[..]].concat();
        // SAFETY: `lse` has `rows` elements, `o` as many rows of `head_dim`, and `sinks` one element per head.
        unsafe { launcher.launch(&kernel, Grid::threads(rows * 32), &args) }
    })
}

/// Sums blocks of tokens, then the blocks, both in order.
pub(super) fn backward(
    launcher: &Launcher,
    sinks: &Tensor,
    lse: &Tensor,
    delta: &Tensor,
    dsinks: &Tensor,
    LseSizes { batch, heads, tokens }: LseSizes,
) -> Result<(), DeviceError> {
    if batch * heads * tokens == 0 {
        return Ok(());
    }
    let kernel = Kernel::of_dtype(&ATTENTION_SINK, "attention_sink_backward", sinks.dtype())?;
    let blocks = tokens.div_ceil(TOKENS);
    let partial = crate::tensor::empty((batch * blocks, heads), DType::F32, lse.device())?;
    launcher.open([&partial], [sinks, lse, delta], |[partial], [sinks, lse, delta]| {
        let args = [partial.into(), sinks.into(), lse.into(), delta.into(), (tokens as u32).into()];
        let grid = Grid { blocks: [blocks, heads, batch], ..Grid::blocks(0) };
        // SAFETY: `lse` and `delta` have `tokens` elements per sequence and head, `sinks` one per head, and `partial` one per
        // block of the grid.
        unsafe { launcher.launch(&kernel, grid, &args) }
    })?;
    add_blocks(launcher, dsinks, &partial, 0)
}
