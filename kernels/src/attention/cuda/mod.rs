//! Attention on a GPU: matmuls by cuBLAS, the steps in between by `cuda/attention.cu`.

mod backward;
mod forward;
mod pass;
mod tiling;

pub(super) use backward::backward;
pub(super) use forward::forward;
pub(super) use tiling::{HeadChunk, Tiling};

use super::dims::OutputDims;
use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::ATTENTION};
use candle_core::{DType, Tensor};
use pass::sizes;

/// Writes `delta [b, hq, sq] = rowsum(o * dout)` for `o, dout [b, sq, hq, d]`.
pub(super) fn delta(
    launcher: &Launcher,
    o: &Tensor,
    dout: &Tensor,
    delta: &Tensor,
    dims: OutputDims,
) -> Result<(), DeviceError> {
    let OutputDims { batch, num_queries, num_heads, head_dim } = dims;
    let kernel = Kernel::of_dtype(&ATTENTION, "attention_delta", o.dtype())?;
    let (rows, width) = (batch * num_queries * num_heads, lanes_per_row(head_dim, o.dtype()));
    launcher.open([delta], [o, dout], |[delta], [o, dout]| {
        let operands = [delta.into(), o.into(), dout.into(), (rows as u64).into()];
        let args = [&operands[..], &sizes([num_queries, num_heads, head_dim, width])].concat();
        // SAFETY: `o` and `dout` have `rows` rows of `head_dim` elements, `delta` one element for each.
        unsafe { launcher.launch(&kernel, Grid::threads(rows * width), &args) }
    })
}

/// Merges `part [b, sq, hq, d]`, and its log-denominators, into `o` and `lse [b, hq, sq]`.
pub(super) fn merge(
    launcher: &Launcher,
    o: &Tensor,
    lse: &Tensor,
    part: &Tensor,
    part_lse: &Tensor,
    dims: OutputDims,
) -> Result<(), DeviceError> {
    let OutputDims { batch, num_queries, num_heads, head_dim } = dims;
    let kernel = Kernel::of_dtype(&ATTENTION, "attention_merge", part.dtype())?;
    let (rows, width) = (batch * num_queries * num_heads, lanes_per_row(head_dim, DType::F32));
    launcher.open([o, lse], [part, part_lse], |[o, lse], [part, part_lse]| {
        let operands = [o.into(), lse.into(), part.into(), part_lse.into(), (rows as u64).into()];
        let args = [&operands[..], &sizes([num_queries, num_heads, head_dim, width])].concat();
        // SAFETY: `o` and `part` have `rows` rows of `head_dim` elements, `lse` and `part_lse` one element for each.
        unsafe { launcher.launch(&kernel, Grid::threads(rows * width), &args) }
    })
}

/// Enough lanes to read a row at once, 16 bytes each.
fn lanes_per_row(head_dim: usize, dtype: DType) -> usize {
    (head_dim * dtype.size_in_bytes()).div_ceil(16).next_power_of_two().min(32)
}
