//! Backward: two launches per chunk of heads, one for keys and one for queries, without scratch.

use super::{Block, HEAD_DIMS_OF_WGMMA, Problem, THREADS, THREADS_OF_WGMMA, grid, head_chunks, sizes};
use crate::attention::{AttentionKernels, Gradients, Upstream};
use crate::device::{
    DeviceError, Kernel, Launcher,
    sources::{ATTENTION_FUSED_BACKWARD, ATTENTION_FUSED_BACKWARD_WGMMA},
};
use candle_core::Tensor;

/// Keys or packed rows of a block, and of a stage: `kRows` of `cuda/attention_fused_backward.cu`.
const ROWS: usize = 64;

/// The blocks of the kernels of every GPU: two stages of two tensors each.
const BLOCK: Block = Block {
    source: &ATTENTION_FUSED_BACKWARD,
    threads: THREADS,
    rows: ROWS,
    shared_rows: 4 * ROWS,
    terms: 2 * ROWS,
};

/// Keys or packed rows of a block, those of a tile, and stages: `kOwn`, `kTile` and `kStages` of
/// `cuda/attention_fused_backward_wgmma.cu`.
const OWN: usize = 128;
const TILE: usize = 64;
const STAGES: usize = 3;

/// The blocks of the kernels of compute capability 9.0: own rows and tiles of two tensors each.
const BLOCK_OF_WGMMA: Block = Block {
    source: &ATTENTION_FUSED_BACKWARD_WGMMA,
    threads: THREADS_OF_WGMMA,
    rows: OWN,
    shared_rows: 2 * (OWN + STAGES * TILE),
    terms: OWN + STAGES * TILE,
};

/// Writes the gradients.
pub(in crate::attention) fn backward(
    launcher: &Launcher,
    kernels: AttentionKernels,
    problem: &Problem<'_>,
    upstream: &Upstream<'_>,
    gradients: &Gradients<'_>,
) -> Result<(), DeviceError> {
    let Problem { q, k, v, dims, dtype, scale, layout } = *problem;
    let Upstream { dout, lse, delta } = *upstream;
    let Gradients { dq, dk, dv } = *gradients;
    let (ranges, heads) = (layout.ranges_on(q.device())?, layout.heads_by_kv_head_on(q.device())?);
    let has_wgmma = kernels == AttentionKernels::Wgmma && HEAD_DIMS_OF_WGMMA.contains(&dims.head_dim);
    let block = if has_wgmma { BLOCK_OF_WGMMA } else { BLOCK };
    let kernel = |of: &str| {
        let name = format!("{}_{of}_{}_{}", block.source.name, dtype.as_str(), dims.head_dim);
        Kernel::named(block.source, name)
    };
    let (of_keys, of_queries) = (kernel("keys"), kernel("queries"));
    let inputs: [&Tensor; 8] = [q, k, v, dout, lse, delta, &heads, &ranges];
    launcher.open([dq, dk, dv], inputs, |[dq, dk, dv], [q, k, v, dout, lse, delta, heads, ranges]| {
        for chunk in head_chunks(problem) {
            let operands =
                [q, k, v, dout, lse, delta, heads.offset(chunk.first_head), ranges].map(Into::into);
            let sizes = sizes(problem, &chunk);
            let parameters = [&operands[..], &[scale.into()], &sizes].concat();
            let grids = [dims.num_keys, dims.num_queries * chunk.group]
                .map(|rows| grid(problem, &chunk, &block, rows));
            // SAFETY: the tensors and tables have the sizes of the problem, and a chunk's heads are among them.
            unsafe {
                launcher.launch(&of_keys, grids[0], &[&[dk.into(), dv.into()], &parameters[..]].concat())?;
                launcher.launch(&of_queries, grids[1], &[&[dq.into()], &parameters[..]].concat())?;
            }
        }
        Ok(())
    })
}
