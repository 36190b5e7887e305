//! The backward kernels of compute capability 9.0, with products of warpgroups.

use super::{Block, TERM};
use crate::device::sources::ATTENTION_FUSED_BACKWARD_WGMMA;

/// Threads per block: `kWgmmaThreads` of `cuda/attention_fused_wgmma.cuh`.
const THREADS: u32 = 256;

/// Keys or packed rows of a block: `kOwn` of `cuda/attention_fused_wgmma.cuh`.
const ROWS: usize = 128;

/// Those of a tile, and stages: `kTile` and `kStages` of `cuda/attention_fused_backward_wgmma.cu`.
const TILE: usize = 64;
const STAGES: usize = 3;

/// The blocks of the kernels: own rows and tiles of two tensors each.
pub(super) const BLOCK: Block = Block {
    source: &ATTENTION_FUSED_BACKWARD_WGMMA,
    threads: THREADS,
    rows: ROWS,
    shared_rows: 2 * (ROWS + STAGES * TILE),
    more_bytes: (ROWS + STAGES * TILE) * TERM,
};
