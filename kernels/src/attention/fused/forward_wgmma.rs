//! The forward kernel of compute capability 9.0, with products of warpgroups and copies by TMA.

use super::{BARRIERS, Block, THREADS_WITH_PRODUCER, WGMMA_ROWS};
use crate::device::sources::ATTENTION_FUSED_FORWARD_WGMMA;

/// Keys of a tile, and stages of keys and of values: `kKeys` and `kStages` of `cuda/attention_fused_forward_wgmma.cu`.
const KEYS: usize = 128;
const STAGES: usize = 2;

/// The block of the kernel: queries, and stages of keys and of values.
pub(super) const BLOCK: Block = Block {
    source: &ATTENTION_FUSED_FORWARD_WGMMA,
    threads: THREADS_WITH_PRODUCER,
    rows: WGMMA_ROWS,
    shared_rows: WGMMA_ROWS + 2 * STAGES * KEYS,
    more_bytes: 2 * STAGES * BARRIERS,
    tma_keys: Some(KEYS),
};
