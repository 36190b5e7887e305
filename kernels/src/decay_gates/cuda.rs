//! The launches of `cuda/decay_gates.cu`.

use super::{Dims, Gradients, Operands};
use crate::device::{Address, Arg, DeviceError, Grid, Kernel, Launcher, sources::DECAY_GATES};
use crate::elementwise::add_blocks;
use candle_core::{DType, Tensor};

/// Tokens that a block sums: `kTokens` of the kernels.
const TOKENS: usize = 512;

/// Heads of a block, one per warp.
const HEADS: usize = Grid::THREADS as usize / 32;

pub(super) fn forward(
    launcher: &Launcher,
    dims: Dims,
    operands: &Operands<'_>,
    g: &Tensor,
    beta: &Tensor,
) -> Result<(), DeviceError> {
    let (Operands { a, a_log, dt_bias, .. }, limits) =
        (*operands, operands.limits().map(|limit| limit as f32));
    let dtype = a.dtype();
    let kernel = Kernel::of_dtype(&DECAY_GATES, "decay_gates_forward", dtype)?;
    let inputs: Vec<_> = [a, a_log, dt_bias].into_iter().chain(operands.b()).collect();
    launcher.open_slices(&[g, beta], &inputs, |addresses| {
        let [g, beta, a, a_log, dt_bias] = std::array::from_fn(|i| addresses[i]);
        let b = addresses.get(5).copied().unwrap_or(Address::null(dtype));
        let size = dims.tokens * dims.columns();
        let tensors = [g, beta, a, b, a_log, dt_bias].map(Into::into);
        let sizes = dims.args(&limits);
        // SAFETY: a and g have an element per token and column, b and beta per token and head, dt_bias and a_log as many of one token.
        unsafe { launcher.launch(&kernel, Grid::threads(size), &[&tensors[..], &sizes].concat()) }
    })
}

/// Sums blocks of tokens, then the blocks, both in order.
pub(super) fn backward(
    launcher: &Launcher,
    dims: Dims,
    operands: &Operands<'_>,
    dg: &Tensor,
    dbeta: &Tensor,
    &Gradients { da, db, da_log, ddt_bias }: &Gradients<'_>,
) -> Result<(), DeviceError> {
    let Dims { tokens, heads, .. } = dims;
    if tokens * heads == 0 {
        return Ok(());
    }
    let dtype = operands.a.dtype();
    let kernel = Kernel::of_dtype(&DECAY_GATES, "decay_gates_backward", dtype)?;
    let blocks = tokens.div_ceil(TOKENS);
    let partial = crate::tensor::empty((blocks, heads + dims.columns()), DType::F32, da.device())?;
    let (Operands { a, a_log, dt_bias, .. }, limits) =
        (*operands, operands.limits().map(|limit| limit as f32));
    let outputs: Vec<_> = [da, &partial].into_iter().chain(db).collect();
    let inputs: Vec<_> = [a, a_log, dt_bias, dg, dbeta].into_iter().chain(operands.b()).collect();
    launcher.open_slices(&outputs, &inputs, |addresses| {
        let (outputs, inputs) = addresses.split_at(outputs.len());
        let [a, a_log, dt_bias, dg, dbeta] = std::array::from_fn(|i| inputs[i]);
        let db = outputs.get(2).copied().unwrap_or(Address::null_output(dtype));
        let b = inputs.get(5).copied().unwrap_or(Address::null(dtype));
        let tensors = [outputs[0], db, outputs[1], a, b, a_log, dt_bias, dg, dbeta].map(Into::into);
        let sizes = dims.args(&limits);
        let grid = Grid { blocks: [blocks, heads.div_ceil(HEADS), 1], ..Grid::blocks(0) };
        // SAFETY: as in `forward`; the gradients are like a and b, and `partial` has an element per head and column for each block.
        unsafe { launcher.launch(&kernel, grid, &[&tensors[..], &sizes].concat()) }
    })?;
    // One at a time: the gradients may be parts of one tensor, which can be opened once.
    da_log.map_or(Ok(()), |da_log| add_blocks(launcher, da_log, &partial, 0))?;
    ddt_bias.map_or(Ok(()), |ddt_bias| add_blocks(launcher, ddt_bias, &partial, heads))
}

impl Dims {
    /// The last arguments of both kernels.
    fn args<'a>(&self, limits: &'a [f32; 2]) -> [Arg<'a>; 4] {
        let [heads, channels] = [self.heads, self.channels].map(|size| Arg::from(size as u32));
        [Arg::Struct(bytemuck::bytes_of(limits)), (self.tokens as u64).into(), heads, channels]
    }
}
