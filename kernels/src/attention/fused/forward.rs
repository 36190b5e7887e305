//! Forward: one launch per chunk of heads, without scratch.

use super::{Block, THREADS, forward_wgmma, grid, head_chunks, sizes};
use crate::attention::operands::{Operands, Problem};
use crate::device::{DeviceError, Kernel, Launcher, TensorMap, sources::ATTENTION_FUSED_FORWARD};
use candle_core::Tensor;

/// Packed rows of a block: `kRows` of `cuda/attention_fused_forward.cu`.
const ROWS: usize = 128;

/// Keys of a tile: `kKeys`.
const KEYS: usize = 64;

/// The block of the kernel of every GPU: queries, keys and values.
const BLOCK: Block = Block {
    source: &ATTENTION_FUSED_FORWARD,
    threads: THREADS,
    rows: ROWS,
    shared_rows: ROWS + 2 * KEYS,
    more_bytes: 0,
    tma_keys: None,
};

/// Writes `o [b, sq, hq, d]` and `lse [b, hq, sq]`.
pub(in crate::attention) fn forward(
    launcher: &Launcher,
    problem: &Problem<'_>,
    o: &Tensor,
    lse: &Tensor,
) -> Result<(), DeviceError> {
    let Problem { operands: Operands { q, k, v, scale, layout, kernels }, dims } = *problem;
    let (ranges, heads) = (layout.ranges_on(q.device())?, layout.heads_by_kv_head_on(q.device())?);
    let block = BLOCK.or_wgmma(forward_wgmma::BLOCK, kernels, dims.head_dim);
    let name = format!("{}_{}_{}", block.source.name, problem.dtype().as_str(), dims.head_dim);
    let kernel = Kernel::named(block.source, name);
    launcher.open([o, lse], [q, k, v, &ranges, &heads], |[o, lse], [q, k, v, ranges, heads]| {
        let maps = block.maps(launcher, &dims, k, v)?;
        let [k, v] = match &maps {
            Some(maps) => maps.each_ref().map(TensorMap::arg),
            None => [k.into(), v.into()],
        };
        for chunk in head_chunks(problem) {
            let operands = [o.into(), lse.into(), q.into(), k, v];
            let tables = [heads.offset(chunk.first_head).into(), ranges.into()];
            let args = [&operands[..], &tables, &[scale.into()], &sizes(problem, &chunk)].concat();
            let grid = grid(problem, &chunk, &block, dims.num_queries * chunk.group);
            // SAFETY: the tensors and tables have the sizes of the problem, and a chunk's heads are among them.
            unsafe { launcher.launch(&kernel, grid, &args)? };
        }
        Ok(())
    })
}
