//! The launches of `cuda/delta_gates.cu`.

use super::{Gradients, Operands};
use crate::device::{Address, Arg, DeviceError, Grid, Kernel, Launcher, sources::DELTA_GATES};
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
    outputs: [&Tensor; 2],
) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&DELTA_GATES, "delta_gates_forward", dtype)?;
    let inputs: Vec<_> = operands.named().into_iter().map(|(_, tensor)| tensor).collect();
    launcher.open_slices(&outputs, &inputs, |addresses| {
        let size = tokens * heads;
        let [g, beta, a, a_log, dt_bias] = std::array::from_fn(|i| addresses[i]);
        let b = addresses.get(5).copied().unwrap_or(Address::null(dtype));
        let tensors = [g, beta, a, b, a_log, dt_bias].map(Into::into);
        let args = [&tensors[..], &limits(operands), &[(size as u64).into(), (heads as u32).into()]].concat();
        // SAFETY: a, b if there is one, and the outputs have `size` elements, a_log and dt_bias one per head.
        unsafe { launcher.launch(&kernel, Grid::threads(size), &args) }
    })
}

fn limits(operands: &Operands<'_>) -> [Arg<'static>; 2] {
    operands.limits().map(|limit| (limit as f32).into())
}

/// Sums blocks of tokens, then the blocks, both in order.
pub(super) fn backward(
    launcher: &Launcher,
    (dtype, [tokens, heads]): (DType, [usize; 2]),
    operands: &Operands<'_>,
    [dg, dbeta]: [&Tensor; 2],
    &Gradients { da, db, da_log, ddt_bias }: &Gradients<'_>,
) -> Result<(), DeviceError> {
    if tokens * heads == 0 {
        return Ok(());
    }
    let kernel = Kernel::of_dtype(&DELTA_GATES, "delta_gates_backward", dtype)?;
    let blocks = tokens.div_ceil(TOKENS);
    let partial = crate::tensor::empty((blocks, 2, heads), DType::F32, da.device())?;
    let Operands { a, a_log, dt_bias, .. } = *operands;
    let (outputs, b) = ([da, &partial].into_iter().chain(db).collect::<Vec<_>>(), operands.b());
    let inputs: Vec<_> = [a, a_log, dt_bias, dg, dbeta].into_iter().chain(b).collect();
    launcher.open_slices(&outputs, &inputs, |addresses| {
        let (outputs, inputs) = addresses.split_at(outputs.len());
        let [a, a_log, dt_bias, dg, dbeta] = std::array::from_fn(|i| inputs[i]);
        let db = outputs.get(2).copied().unwrap_or(Address::null_output(dtype));
        let b = inputs.get(5).copied().unwrap_or(Address::null(dtype));
        let tensors = [outputs[0], db, outputs[1], a, b, a_log, dt_bias, dg, dbeta].map(Into::into);
        let sizes = [(tokens as u64).into(), (heads as u32).into()];
        let args = [&tensors[..], &limits(operands), &sizes].concat();
        let grid = Grid { blocks: [blocks, heads.div_ceil(HEADS), 1], ..Grid::blocks(0) };
        // SAFETY: as in `forward`; the gradients are like a and b, and `partial` has two rows of `heads` per block.
        unsafe { launcher.launch(&kernel, grid, &args) }
    })?;
    // One at a time: the gradients may be parts of one tensor, which can be opened once.
    da_log.map_or(Ok(()), |da_log| add_blocks(launcher, da_log, &partial, 0))?;
    ddt_bias.map_or(Ok(()), |ddt_bias| add_blocks(launcher, ddt_bias, &partial, heads))
}
