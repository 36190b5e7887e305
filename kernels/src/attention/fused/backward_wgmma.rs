//! The backward kernels of compute capability 9.0, with products of warpgroups, and copies by a third one.

use super::{BARRIERS, Block, TERM, THREADS_WITH_PRODUCER, WGMMA_ROWS};
use crate::device::sources::ATTENTION_FUSED_BACKWARD_WGMMA;

/// Packed rows of a tile, and stages: `kRows` and `kStages` of `cuda/attention_fused_backward_wgmma.cu`.
const ROWS: usize = 64;
const STAGES: usize = 3;

/// The block of the kernel for keys: own keys and values, tiles of packed rows of two tensors with their terms, and
/// barriers.
pub(super) const BLOCK_OF_KEYS: Block = Block {
    source: &ATTENTION_FUSED_BACKWARD_WGMMA,
    threads: THREADS_WITH_PRODUCER,
    rows: WGMMA_ROWS,
    shared_rows: 2 * (WGMMA_ROWS + STAGES * ROWS),
    more_bytes: (WGMMA_ROWS + STAGES * ROWS) * TERM + STAGES * BARRIERS,
    tma_keys: None,
};

/// The block of the kernel for queries: own rows with their terms, tiles of keys and values, and barriers.
pub(super) fn block_of_queries(head_dim: usize) -> Block {
    // `kKeys` of the same file.
    let keys = if head_dim == 64 { 128 } else { 64 };
    Block {
        shared_rows: 2 * (WGMMA_ROWS + STAGES * keys),
        more_bytes: WGMMA_ROWS * TERM + 2 * STAGES * BARRIERS,
        tma_keys: Some(keys),
        ..BLOCK_OF_KEYS
    }
}
