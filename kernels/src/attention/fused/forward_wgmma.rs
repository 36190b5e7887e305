//! The forward kernel of compute capability 9.0, with products of warpgroups.

use super::{Block, THREADS_OF_WGMMA};
use crate::device::sources::ATTENTION_FUSED_FORWARD_WGMMA;

/// Packed rows of a block, and keys of a tile: `kOwn` of `cuda/attention_fused_wgmma.cuh`, `kKeys` of
/// `cuda/attention_fused_forward_wgmma.cu`.
const ROWS: usize = 128;
const KEYS: usize = 128;

/// The block of the kernel: queries, and two stages of keys and values.
pub(super) const BLOCK: Block = Block {
    source: &ATTENTION_FUSED_FORWARD_WGMMA,
    threads: THREADS_OF_WGMMA,
    rows: ROWS,
    shared_rows: ROWS + 4 * KEYS,
    terms: 0,
};
