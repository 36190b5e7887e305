//! The launches of `cuda/delta_gates.cu`.

use super::{Gradients, Operands};
use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::DELTA_GATES};
use crate::elementwise::add_blocks;
use candle_core::{DType, Tensor};

/// Tokens that a block sums: `kTokens` of the kernels.
const TOKENS: usize = 512;

/// Heads of a block, one per warp.
const HEADS: usize = Grid::THREADS as usize / 32;

pub(super) fn forward(
    launcher: &Launcher,
    (dtype, [tokens, heads]): (DType, [usize; 2]),
    operands: &Operands<'_>,
    b: &Tensor,
    outputs: [&Tensor; 2],
) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&DELTA_GATES, "delta_gates_forward", dtype)?;
    let Operands { a, a_log, dt_bias, .. } = *operands;
    launcher.open(outputs, [a, b, a_log, dt_bias], |outputs, inputs| {
        let size = tokens * heads;
        let tensors: Vec<_> = outputs.into_iter().chain(inputs).map(Into::into).collect();
        let args = [&tensors[..], &[(size as u64).into(), (heads as u32).into()]].concat();
        // SAFETY: a, b and the outputs have `size` elements, a_log and dt_bias one per head.
        unsafe { launcher.launch(&kernel, Grid::threads(size), &args) }
    })
}

/// Sums blocks of tokens, then the blocks, both in order.
pub(super) fn backward(
    launcher: &Launcher,
    (dtype, [tokens, heads]): (DType, [usize; 2]),
    operands: &Operands<'_>,
    [b, db]: [&Tensor; 2],
    [dg, dbeta]: [&Tensor; 2],
    &Gradients { da, da_log, ddt_bias, .. }: &Gradients<'_>,
) -> Result<(), DeviceError> {
    if tokens * heads == 0 {
        return Ok(());
    }
    let kernel = Kernel::of_dtype(&DELTA_GATES, "delta_gates_backward", dtype)?;
    let blocks = tokens.div_ceil(TOKENS);
    let partial = crate::tensor::empty((blocks, 2, heads), DType::F32, da.device())?;
    let Operands { a, a_log, dt_bias, .. } = *operands;
    launcher.open([da, db, &partial], [a, b, a_log, dt_bias, dg, dbeta], |outputs, inputs| {
        let tensors: Vec<_> = outputs.into_iter().chain(inputs).map(Into::into).collect();
        let args = [&tensors[..], &[(tokens as u64).into(), (heads as u32).into()]].concat();
        let grid = Grid { blocks: [blocks, heads.div_ceil(HEADS), 1], ..Grid::blocks(0) };
        // SAFETY: as in `forward`; the gradients are like a and b, and `partial` has two rows of `heads` per block.
        unsafe { launcher.launch(&kernel, grid, &args) }
    })?;
    // One at a time: the gradients may be parts of one tensor, which can be opened once.
    da_log.map_or(Ok(()), |da_log| add_blocks(launcher, da_log, &partial, 0))?;
    ddt_bias.map_or(Ok(()), |ddt_bias| add_blocks(launcher, ddt_bias, &partial, heads))
}
