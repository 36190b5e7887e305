//! Forward: one launch per chunk of heads, without scratch.

use super::{Block, HEAD_DIMS_OF_WGMMA, Problem, THREADS, THREADS_OF_WGMMA, grid, head_chunks, sizes};
use crate::attention::AttentionKernels;
use crate::device::{
    DeviceError, Kernel, Launcher,
    sources::{ATTENTION_FUSED_FORWARD, ATTENTION_FUSED_FORWARD_WGMMA},
};
use candle_core::Tensor;

/// Packed rows of a block: `kRows` of `cuda/attention_fused_forward.cu`, `kOwn` with products of warpgroups.
const ROWS: usize = 128;

/// Keys of a tile: `kKeys` of `cuda/attention_fused_forward.cu` and of `cuda/attention_fused_forward_wgmma.cu`.
const KEYS: usize = 64;
const KEYS_OF_WGMMA: usize = 128;

/// The block of the kernel of every GPU: queries, keys and values.
const BLOCK: Block = Block {
    source: &ATTENTION_FUSED_FORWARD,
    threads: THREADS,
    rows: ROWS,
    shared_rows: ROWS + 2 * KEYS,
    terms: 0,
};

/// The block of the kernel of compute capability 9.0: queries, and two stages of keys and values.
const BLOCK_OF_WGMMA: Block = Block {
    source: &ATTENTION_FUSED_FORWARD_WGMMA,
    threads: THREADS_OF_WGMMA,
    rows: ROWS,
    shared_rows: ROWS + 4 * KEYS_OF_WGMMA,
    terms: 0,
};

/// Writes `o [b, sq, hq, d]` and `lse [b, hq, sq]`.
pub(in crate::attention) fn forward(
    launcher: &Launcher,
    kernels: AttentionKernels,
    problem: &Problem<'_>,
    [o, lse]: [&Tensor; 2],
) -> Result<(), DeviceError> {
    let Problem { q, k, v, dims, dtype, scale, layout } = *problem;
    let (ranges, heads) = (layout.ranges_on(q.device())?, layout.heads_by_kv_head_on(q.device())?);
    let has_wgmma = kernels == AttentionKernels::Wgmma && HEAD_DIMS_OF_WGMMA.contains(&dims.head_dim);
    let block = if has_wgmma { BLOCK_OF_WGMMA } else { BLOCK };
    let name = format!("{}_{}_{}", block.source.name, dtype.as_str(), dims.head_dim);
    let kernel = Kernel::named(block.source, name);
    launcher.open([o, lse], [q, k, v, &ranges, &heads], |[o, lse], [q, k, v, ranges, heads]| {
        for chunk in head_chunks(problem) {
            let addresses = [o, lse, q, k, v, heads.offset(chunk.first_head), ranges].map(Into::into);
            let args = [&addresses[..], &[scale.into()], &sizes(problem, &chunk)].concat();
            let grid = grid(problem, &chunk, &block, dims.num_queries * chunk.group);
            // SAFETY: the tensors and tables have the sizes of the problem, and a chunk's heads are among them.
            unsafe { launcher.launch(&kernel, grid, &args)? };
        }
        Ok(())
    })
}
