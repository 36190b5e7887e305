//! Backward: two launches per chunk of heads, one for keys and one for queries, without scratch.

use super::{Problem, grid, head_chunks, sizes};
use crate::attention::{Gradients, Upstream};
use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::ATTENTION_FUSED_BACKWARD};
use candle_core::Tensor;

/// Keys or packed rows of a block: `kRows` of `cuda/attention_fused_backward.cu`.
const ROWS: usize = 64;

/// Bytes of a packed row besides its elements: `RowTerms`.
const TERMS: usize = 16;

/// Writes the gradients.
pub(in crate::attention) fn backward(
    launcher: &Launcher,
    problem: &Problem<'_>,
    upstream: &Upstream<'_>,
    gradients: &Gradients<'_>,
) -> Result<(), DeviceError> {
    let Problem { q, k, v, dims, dtype, scale, layout } = *problem;
    let Upstream { dout, lse, delta } = *upstream;
    let Gradients { dq, dk, dv } = *gradients;
    let (ranges, heads) = (layout.ranges_on(q.device())?, layout.heads_by_kv_head_on(q.device())?);
    let kernel = |of: &str| {
        let name = format!("attention_fused_backward_{of}_{}_{}", dtype.as_str(), dims.head_dim);
        Kernel::named(&ATTENTION_FUSED_BACKWARD, name)
    };
    let (of_keys, of_queries) = (kernel("keys"), kernel("queries"));
    let inputs: [&Tensor; 8] = [q, k, v, dout, lse, delta, &heads, &ranges];
    launcher.open([dq, dk, dv], inputs, |[dq, dk, dv], [q, k, v, dout, lse, delta, heads, ranges]| {
        for chunk in head_chunks(problem) {
            let operands =
                [q, k, v, dout, lse, delta, heads.offset(chunk.first_head), ranges].map(Into::into);
            let sizes = sizes(problem, &chunk);
            let parameters = [&operands[..], &[scale.into()], &sizes].concat();
            // Two stages of two tensors each.
            let grid = |parts| {
                let grid = grid(problem, &chunk, parts, 4 * ROWS);
                Grid { shared_bytes: grid.shared_bytes + 2 * ROWS * TERMS, ..grid }
            };
            let grids = [dims.num_keys, dims.num_queries * chunk.group].map(|rows| grid(rows.div_ceil(ROWS)));
            // SAFETY: the tensors and tables have the sizes of the problem, and a chunk's heads are among them.
            unsafe {
                launcher.launch(&of_keys, grids[0], &[&[dk.into(), dv.into()], &parameters[..]].concat())?;
                launcher.launch(&of_queries, grids[1], &[&[dq.into()], &parameters[..]].concat())?;
            }
        }
        Ok(())
    })
}
