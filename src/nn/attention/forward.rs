//! The forward pass of self-attention.

use super::chunk_pipeline::run_chunks;
use super::saved::{AttentionSaved, QkvHeads, ReturningChunk, Saves};
use super::{SelfAttention, output_gate, trim_after_chunks};
use crate::nn::{BranchInput, ForwardPass, HeadRanges, LayerError, columns, token_dims, token_rows};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::rope::Direction;

impl SelfAttention {
    /// Adds the attention's output to the tensor that the branch opens, and passes every chunk's state to `keep`: all of
    /// it, or that of a checkpoint.
    ///
    /// # Shapes
    /// Result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A number of head chunks that the KV heads do not allow, a refused operation, or failed communication.
    pub fn forward(
        &self,
        input: BranchInput<'_>,
        saves: Saves,
        mut keep: impl FnMut(AttentionSaved),
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let (ctx, ws) = (pass.ctx, pass.workspace());
        let y = input.branch.open(input.x, pass)?;
        self.o.add_bias_to(&y, pass)?;
        let rstd = ws.alloc_f32(token_dims(input.x))?;
        run_chunks(
            &self.shape.head_chunks(pass)?,
            ctx.overlaps_exchange(),
            |chunk| {
                let QkvHeads { q, k, v, norms, gate } = self.project_heads(input, &rstd, chunk, pass)?;
                Ok((
                    ctx.attention().start_forward(q, k, v, &self.layout(chunk, pass, None)?, ws)?,
                    norms,
                    gate,
                ))
            },
            |_, (attend, norms, gate)| {
                let (inner, out) = attend(())?;
                let mut chunk = ReturningChunk::new(inner, norms, gate, out);
                if saves == Saves::Checkpoint {
                    chunk.recycle_qkv(pass);
                }
                Ok(chunk)
            },
            |chunk, returning| {
                let saved = returning.finish(pass)?;
                self.add_projection(chunk, &saved, &y, pass)?;
                keep(saved);
                Ok::<_, LayerError>(())
            },
        )?;
        ws.recycle(rstd);
        trim_after_chunks(pass);
        Ok(y)
    }

    /// The result of [`forward`](Self::forward), from the saved outputs of all chunks. Recomputes their gates.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_from_outputs(
        &self,
        input: BranchInput<'_>,
        saved_chunks: &mut [AttentionSaved],
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let y = input.branch.open(input.x, pass)?;
        self.o.add_bias_to(&y, pass)?;
        for (chunk, saved) in self.shape.head_chunks(pass)?.iter().zip(saved_chunks) {
            saved.gate = self.project_gate(input, chunk, pass)?;
            self.add_projection(chunk, saved, &y, pass)?;
        }
        Ok(y)
    }

    /// Adds a chunk's part of the output projection to `y`.
    fn add_projection(
        &self,
        chunk: &HeadRanges,
        saved: &AttentionSaved,
        y: &Tensor,
        pass: &ForwardPass<'_>,
    ) -> Result<(), LayerError> {
        let gated =
            saved.gate.as_ref().map(|gate| output_gate::apply(gate, saved.out(), pass)).transpose()?;
        let out = gated.as_ref().unwrap_or(saved.out());
        let o = self.o.columns(&self.o_inputs(chunk), pass)?;
        o.forward(&out.flatten_from(2)?, y, true, pass.workspace())?;
        pass.recycle(gated);
        Ok(())
    }

    /// The gate of one chunk, if there is one.
    fn project_gate(
        &self,
        input: BranchInput<'_>,
        chunk: &HeadRanges,
        pass: &ForwardPass<'_>,
    ) -> Result<Option<Tensor>, LayerError> {
        if !self.shape.output_gate {
            return Ok(None);
        }
        let (rows, joint) = (self.q.rows(&chunk.q, pass)?, self.q.alloc_outputs(&chunk.q, pass)?);
        let rstd = pass.workspace().alloc_f32(token_dims(input.x))?;
        let project = |normed: &Tensor, tile: &Range<usize>| {
            rows.forward(normed, &token_rows(&joint, tile)?, false, pass.workspace())
        };
        input.for_each_tile(&rstd, project, pass)?;
        let mut parts = columns::split(joint, 2, pass.workspace())?;
        let gate = parts.pop();
        pass.recycle(parts.into_iter().chain([rstd]));
        Ok(gate)
    }

    /// Queries, keys, values and gate of one chunk. Writes the tokens' reciprocal root mean squares to `rstd`.
    pub(super) fn project_heads(
        &self,
        input: BranchInput<'_>,
        rstd: &Tensor,
        chunk: &HeadRanges,
        pass: &ForwardPass<'_>,
    ) -> Result<QkvHeads, LayerError> {
        let of_chunk = [(&self.q, &chunk.q), (&self.k, &chunk.kv), (&self.v, &chunk.kv)];
        let [wq, wk, wv] = of_chunk.map(|(projection, heads)| projection.rows(heads, pass));
        let (wq, wk, wv) = (wq?, wk?, wv?);
        let [q, k, v] = of_chunk.map(|(projection, heads)| projection.alloc_outputs(heads, pass));
        let (q, k, v) = (q?, k?, v?);
        let project = |normed: &Tensor, tile: &Range<usize>| {
            [(&wq, &q), (&wk, &k), (&wv, &v)].into_iter().try_for_each(|(weights, y)| {
                weights.forward(normed, &token_rows(y, tile)?, false, pass.workspace())
            })
        };
        input.for_each_tile(rstd, project, pass)?;
        let mut parts =
            columns::split(q, if self.shape.output_gate { 2 } else { 1 }, pass.workspace())?.into_iter();
        let (q, gate) = (parts.next().unwrap_or_else(|| unreachable!("one part or two")), parts.next());
        let (q, q_norm) = self.q.normalize(q, pass)?;
        let (k, k_norm) = self.k.normalize(k, pass)?;
        let (v, v_norm) = self.v.normalize(v, pass)?;
        self.rotate([&q, &k], Direction::Forward, pass)?;
        Ok(QkvHeads { q, k, v, norms: [q_norm, k_norm, v_norm], gate })
    }
}
