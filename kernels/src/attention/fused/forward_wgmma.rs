//! The forward kernel of compute capability 9.0, with products of warpgroups and copies by TMA.

use super::{Block, Dims};
use crate::device::sources::ATTENTION_FUSED_FORWARD_WGMMA;
use crate::device::{Address, DeviceError, Launcher, TensorMap};

/// Threads per block: `kThreadsWithProducer` of `cuda/attention_fused_forward_wgmma.cu`.
const THREADS: u32 = 384;

/// Packed rows of a block: `kOwn` of `cuda/attention_fused_wgmma.cuh`.
const ROWS: usize = 128;

/// Keys of a tile, and stages of keys and of values: `kKeys` and `kStages`.
const KEYS: usize = 128;
const STAGES: usize = 2;

/// Bytes of the barriers of a stage of keys or of values.
const BARRIERS: usize = 2 * size_of::<u64>();

/// The block of the kernel: queries, and stages of keys and of values.
pub(super) const BLOCK: Block = Block {
    source: &ATTENTION_FUSED_FORWARD_WGMMA,
    threads: THREADS,
    rows: ROWS,
    shared_rows: ROWS + 2 * STAGES * KEYS,
    more_bytes: 2 * STAGES * BARRIERS,
};

/// The maps of keys and values, from which the kernel copies tiles.
pub(super) fn maps(
    launcher: &Launcher,
    dims: &Dims,
    [k, v]: [Address; 2],
) -> Result<[TensorMap; 2], DeviceError> {
    let map = |address| launcher.tensor_map(address, dims.kv_shape(), KEYS);
    Ok([map(k)?, map(v)?])
}
