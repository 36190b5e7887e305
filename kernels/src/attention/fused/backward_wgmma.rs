//! The backward kernels of compute capability 9.0, with products of warpgroups, and copies by TMA for queries.

use super::{BARRIERS, Block, TERM, THREADS_WITH_PRODUCER, WGMMA_ROWS, WGMMA_THREADS};
use crate::device::sources::ATTENTION_FUSED_BACKWARD_WGMMA;

/// Rows of a tile, and stages: `kTile` and `kStages` of `cuda/attention_fused_backward_wgmma.cu`.
const TILE: usize = 64;
const STAGES: usize = 3;

/// The block of the kernel for keys: own rows and tiles of two tensors each.
pub(super) const KEYS: Block = Block {
    source: &ATTENTION_FUSED_BACKWARD_WGMMA,
    threads: WGMMA_THREADS,
    rows: WGMMA_ROWS,
    shared_rows: 2 * (WGMMA_ROWS + STAGES * TILE),
    more_bytes: (WGMMA_ROWS + STAGES * TILE) * TERM,
    tma_keys: None,
};

/// The block of the kernel for queries: the same, with terms of the own rows only, and barriers.
pub(super) const QUERIES: Block = Block {
    threads: THREADS_WITH_PRODUCER,
    more_bytes: WGMMA_ROWS * TERM + 2 * STAGES * BARRIERS,
    tma_keys: Some(TILE),
    ..KEYS
};
