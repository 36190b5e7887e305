//! Backward: two launches per chunk of heads, one for keys and one for queries, without scratch.

use super::{Block, TERM, THREADS, backward_wgmma, grid, head_chunks, sizes};
use crate::attention::operands::{Gradients, Operands, Problem, Upstream};
use crate::device::{Arg, DeviceError, Kernel, Launcher, TensorMap, sources::ATTENTION_FUSED_BACKWARD};
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
    tma_keys: None,
};

/// Writes the gradients.
pub(in crate::attention) fn backward(
    launcher: &Launcher,
    problem: &Problem<'_>,
    upstream: &Upstream<'_>,
    gradients: &Gradients<'_>,
) -> Result<(), DeviceError> {
    let Problem { operands: Operands { q, k, v, scale, layout, kernels }, dims } = *problem;
    let Upstream { dout, lse, delta } = *upstream;
    let Gradients { dq, dk, dv } = *gradients;
    let (ranges, heads) = (layout.ranges_on(q.device())?, layout.heads_by_kv_head_on(q.device())?);
    let [keys, queries] = [backward_wgmma::BLOCK_OF_KEYS, backward_wgmma::block_of_queries(dims.head_dim)]
        .map(|of_wgmma| BLOCK.or_wgmma(of_wgmma, kernels, dims.head_dim));
    let kernel = |block: &Block, of: &str| {
        let name = format!("{}_{of}_{}_{}", block.source.name, problem.dtype().as_str(), dims.head_dim);
        Kernel::named(block.source, name)
    };
    let (of_keys, of_queries) = (kernel(&keys, "keys"), kernel(&queries, "queries"));
    let inputs: [&Tensor; 8] = [q, k, v, dout, lse, delta, &heads, &ranges];
    launcher.open([dq, dk, dv], inputs, |[dq, dk, dv], [q, k, v, dout, lse, delta, heads, ranges]| {
        let maps = queries.maps(launcher, &dims, k, v)?;
        let maps: Vec<Arg<'_>> = maps.iter().flatten().map(TensorMap::arg).collect();
        for chunk in head_chunks(problem) {
            let operands =
                [q, k, v, dout, lse, delta, heads.offset(chunk.first_head), ranges].map(Into::into);
            let sizes = sizes(problem, &chunk);
            let parameters = [&operands[..], &[scale.into()], &sizes].concat();
            let grid_of_keys = grid(problem, &chunk, &keys, dims.num_keys);
            let grid_of_queries = grid(problem, &chunk, &queries, dims.num_queries * chunk.group);
            let args_of_keys = [&[dk.into(), dv.into()], &parameters[..]].concat();
            let args_of_queries = [&[dq.into()], &maps[..], &parameters[..]].concat();
            // SAFETY: the tensors and tables have the sizes of the problem, and a chunk's heads are among them.
            unsafe {
                launcher.launch(&of_keys, grid_of_keys, &args_of_keys)?;
                launcher.launch(&of_queries, grid_of_queries, &args_of_queries)?;
            }
        }
        Ok(())
    })
}
