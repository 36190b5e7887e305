//! Attention on a GPU: matmuls by cuBLAS, the steps in between by `cuda/attention.cu`.

mod backward;
mod forward;
mod pass;
mod tiling;

pub(super) use backward::backward;
pub(super) use forward::forward;
pub(super) use tiling::{HeadChunk, Tiling};

use super::{AttentionLayout, dims::Dims};
use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::ATTENTION};
use candle_core::{DType, Tensor};

/// Inputs of both directions, checked by the caller.
pub(super) struct Problem<'a> {
    pub(super) q: &'a Tensor,
    pub(super) k: &'a Tensor,
    pub(super) v: &'a Tensor,
    pub(super) dims: Dims,
    /// Element type of `q`, `k`, `v` and all tensors of their shapes.
    pub(super) dtype: DType,
    pub(super) scale: f32,
    pub(super) layout: &'a AttentionLayout,
}

/// Writes `delta [b, hq, sq] = rowsum(o * dout)` for `o, dout [b, sq, hq, d]`.
pub(super) fn delta(
    launcher: &Launcher,
    dtype: DType,
    [o, dout, delta]: [&Tensor; 3],
    [batch, tokens, heads, head_dim]: [usize; 4],
) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&ATTENTION, "attention_delta", dtype)?;
    let (rows, width) = (batch * tokens * heads, lanes_per_row(head_dim, dtype));
    launcher.open([delta], [o, dout], |[delta], [o, dout]| {
        let args = [
            delta.into(),
            o.into(),
            dout.into(),
            (rows as u64).into(),
            (tokens as u32).into(),
            (heads as u32).into(),
            (head_dim as u32).into(),
            (width as u32).into(),
        ];
        // SAFETY: `o` and `dout` have `rows` rows of `head_dim` elements, `delta` one element for each.
        unsafe { launcher.launch(&kernel, Grid::threads(rows * width), &args) }
    })
}

/// Merges `part [b, sq, hq, d]` of type `dtype`, and its log-denominators, into `o` and `lse [b, hq, sq]`.
pub(super) fn merge(
    launcher: &Launcher,
    dtype: DType,
    [o, lse, part, part_lse]: [&Tensor; 4],
    [batch, tokens, heads, head_dim]: [usize; 4],
) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&ATTENTION, "attention_merge", dtype)?;
    let (rows, width) = (batch * tokens * heads, lanes_per_row(head_dim, DType::F32));
    launcher.open([o, lse], [part, part_lse], |[o, lse], [part, part_lse]| {
        let args = [
            o.into(),
            lse.into(),
            part.into(),
            part_lse.into(),
            (rows as u64).into(),
            (tokens as u32).into(),
            (heads as u32).into(),
            (head_dim as u32).into(),
            (width as u32).into(),
        ];
        // SAFETY: `o` and `part` have `rows` rows of `head_dim` elements, `lse` and `part_lse` one element for each.
        unsafe { launcher.launch(&kernel, Grid::threads(rows * width), &args) }
    })
}

/// Enough lanes to read a row at once, 16 bytes each.
fn lanes_per_row(head_dim: usize, dtype: DType) -> usize {
    (head_dim * dtype.size_in_bytes()).div_ceil(16).next_power_of_two().min(32)
}
