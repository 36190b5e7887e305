//! The launch of `cuda/rope.cu`.

use super::{Direction, HeadPairs, Table};
use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::ROPE};
use candle_core::{DType, Tensor};

/// Elements per block, rounded to whole tokens: several accesses per thread.
const ELEMS_PER_BLOCK: usize = 8192;

/// Rotates `heads` heads of each token of `x`.
pub(super) fn apply(
    launcher: &Launcher,
    dtype: DType,
    x: &Tensor,
    heads: usize,
    table: &Table,
    direction: Direction,
) -> Result<(), DeviceError> {
    if x.elem_count() == 0 {
        return Ok(());
    }
    let kernel = Kernel::of_dtype(&ROPE, "rope_apply", dtype)?;
    let [cos, sin] = table.on(x.device())?;
    let (tokens, HeadPairs { head_dim, pairs, interleaved }) = (table.tokens, table.heads);
    let tokens_per_block = (ELEMS_PER_BLOCK / (heads * head_dim)).max(1);
    let sign: f32 = match direction {
        Direction::Forward => 1.0,
        Direction::Backward => -1.0,
    };
    launcher.open([x], [&cos, &sin], |[x], [cos, sin]| {
        let args = [
            x.into(),
            cos.into(),
            sin.into(),
            (tokens as u64).into(),
            (tokens_per_block as u32).into(),
            (heads as u32).into(),
            (head_dim as u32).into(),
            (pairs as u32).into(),
            u32::from(interleaved).into(),
            sign.into(),
        ];
        // SAFETY: `x` has `tokens` · `heads` · `head_dim` elements, of which 2 · `pairs` per head rotate; the tables have
        // `tokens` · `pairs` each.
        unsafe { launcher.launch(&kernel, Grid::blocks(tokens.div_ceil(tokens_per_block)), &args) }
    })
}
