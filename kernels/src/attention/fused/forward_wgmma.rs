//! The forward kernel of compute capability 9.0, with products of warpgroups.

use super::Block;
use crate::device::sources::ATTENTION_FUSED_FORWARD_WGMMA;

/// The head dimensions that have kernels.
const HEAD_DIMS: [usize; 2] = [64, 128];

/// Packed rows of a block, keys of a tile and threads: `kRows`, `kKeys` and `kThreads` of
/// `cuda/attention_fused_forward_wgmma.cu`.
const ROWS: usize = 128;
const KEYS: usize = 128;
const THREADS: u32 = 256;

/// The block of the kernel, if there is one for a head dimension: queries, and two stages of keys and values.
pub(super) fn block(head_dim: usize) -> Option<Block> {
    let source = &ATTENTION_FUSED_FORWARD_WGMMA;
    HEAD_DIMS.contains(&head_dim).then_some(Block {
        source,
        threads: THREADS,
        rows: ROWS,
        shared_rows: ROWS + 4 * KEYS,
    })
}
