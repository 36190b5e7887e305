//! Backward: two launches per chunk of heads, one for keys and one for queries, without scratch.

use super::{Block, Problem, TERM, THREADS, backward_wgmma, grid, head_chunks, sizes};
use crate::attention::{AttentionKernels, Gradients, Upstream};
use crate::device::{DeviceError, Kernel, Launcher, sources::ATTENTION_FUSED_BACKWARD};
use candle_core::Tensor;

/// Keys or packed rows of a block, and of a stage: `kRows` of `cuda/attention_fused_backward.cu`.
const ROWS: usize = 64;

/// The blocks of the kernels of every GPU: two stages of two tensors each.
const BLOCK: Block = Block {
    source: &ATTENTION_FUSED_BACKWARD,
    threads: THREADS,
    rows: ROWS,
    shared_rows: 4 * ROWS,
    more_bytes: 2 * ROWS * TERM,
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
    let block = BLOCK.or_wgmma(backward_wgmma::BLOCK, kernels, dims.head_dim);
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
