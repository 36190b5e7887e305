//! The backward pass of self-attention.

use super::chunk_pipeline::run_chunks;
use super::output_gate::{self, GatedOutput};
use super::saved::{AttentionSaved, ChunkState, HeadNorms, QkvHeads, delta, release_output};
use super::{SelfAttention, trim_after_chunks};
use crate::nn::{
    BackwardPass, BranchGradients, BranchInput, HeadRanges, LayerError, columns, token_dims, token_rows,
};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::attention::{AttentionLayout, QkvGradients, Returning, SavedAttention, Upstream};
use ulysses_kernels::rope::Direction;
use ulysses_kernels::strided_copy;

/// One backward pass.
struct AttentionBackward<'a> {
    module: &'a SelfAttention,
    input: BranchInput<'a>,
    /// Reciprocal root mean squares of its tokens.
    rstd: Tensor,
    /// The gradient of the output.
    dy: &'a Tensor,
    pass: &'a BackwardPass<'a>,
}

/// A chunk's operands on their way. The second step computes its gradients and starts to return them.
type Attend<'p> = Box<dyn FnOnce() -> Result<ReturningGradients<'p>, LayerError> + 'p>;

/// A chunk's gradients on their way back.
struct ReturningGradients<'p> {
    dqkv: Returning<'p, QkvGradients>,
    /// The recomputed output, if gradients still need it.
    out: Option<AwaitedOutput<'p>>,
    /// The gradient of the gate, if there is one and the output is known.
    dgate: Option<Tensor>,
    norms: HeadNorms,
}

/// A recomputed output: where it was computed, on its way back, and its gate.
struct AwaitedOutput<'p> {
    sent: Tensor,
    out: Returning<'p, Tensor>,
    gated: Option<GatedOutput>,
}

impl SelfAttention {
    /// Backward of [`forward`](Self::forward): also adds to the gradients of the parameters. A chunk is recomputed as far as its state
    /// is not saved.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(
        &self,
        input: BranchInput<'_>,
        saved_chunks: Vec<AttentionSaved>,
        BranchGradients { dy, dx }: BranchGradients<'_>,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let rstd = pass.forward.workspace().alloc_f32(token_dims(input.x))?;
        AttentionBackward { module: self, input, rstd, dy, pass }.run(saved_chunks, dx)
    }
}

impl AttentionBackward<'_> {
    fn run(self, saved_chunks: Vec<AttentionSaved>, dx: &Tensor) -> Result<(), LayerError> {
        let forward = &self.pass.forward;
        let dnormed = forward.workspace().alloc(self.input.x.dims())?;
        self.module.o.backward_bias(self.dy, self.pass)?;
        let mut saved_chunks = saved_chunks.into_iter();
        let mut accumulates = false;
        run_chunks(
            &self.module.shape.head_chunks(forward)?,
            forward.ctx.overlaps_exchange(),
            |chunk| match saved_chunks.next() {
                Some(AttentionSaved { state: ChunkState::Whole { inner, out, norms }, gate }) => {
                    self.start_saved(chunk, inner, out, norms, gate)
                }
                Some(AttentionSaved { state: ChunkState::Output { out, lse }, gate }) => {
                    self.start_from_output(chunk, out, lse, gate)
                }
                None => self.start_recomputed(chunk),
            },
            |_, attend| attend(),
            |chunk, returning| {
                let dqkv = self.finish(chunk, returning)?;
                self.backward_projections(chunk, dqkv, &dnormed, std::mem::replace(&mut accumulates, true))
            },
        )?;
        let Self { input: BranchInput { branch, x }, rstd, pass, .. } = self;
        branch.backward_enter(&dnormed, x, &rstd, dx, pass)?;
        forward.recycle([dnormed, rstd]);
        trim_after_chunks(forward);
        Ok(())
    }

    /// Starts a chunk with its whole state.
    fn start_saved(
        &self,
        chunk: &HeadRanges,
        inner: SavedAttention,
        out: Tensor,
        norms: HeadNorms,
        gate: Option<Tensor>,
    ) -> Result<Attend<'_>, LayerError> {
        let forward = &self.pass.forward;
        let (ws, layout) = (forward.workspace(), self.layout(chunk)?);
        let (dout, gated) = self.dout(chunk, gate)?;
        let dgate = self.backward_output(chunk, &out, gated)?;
        release_output(out, &inner, forward);
        let attend = forward.ctx.attention().start_backward(&dout, &layout, ws)?;
        Ok(Box::new(move || {
            let dqkv = attend(inner)?;
            ws.recycle(dout);
            Ok(ReturningGradients { dqkv, out: None, dgate, norms })
        }))
    }

    /// Starts a chunk of which the output is saved, and the gate if there is one: recomputes q, k and v.
    fn start_from_output(
        &self,
        chunk: &HeadRanges,
        out: Tensor,
        lse: Tensor,
        gate: Option<Tensor>,
    ) -> Result<Attend<'_>, LayerError> {
        let forward = &self.pass.forward;
        let (ws, layout) = (forward.workspace(), self.layout(chunk)?);
        let (dout, gated) = self.dout(chunk, gate)?;
        let dgate = self.backward_output(chunk, &out, gated)?;
        let delta = delta(out, &dout, forward)?;
        let QkvHeads { q, k, v, norms, gate } = self.project_heads(chunk)?;
        forward.recycle(gate);
        let upstream = Upstream { dout: &dout, lse: &lse, delta: &delta };
        let attend = forward.ctx.attention().start_backward_recomputed(q, k, v, &upstream, &layout, ws)?;
        Ok(Box::new(move || {
            let dqkv = attend(())?;
            forward.recycle([lse, delta, dout]);
            Ok(ReturningGradients { dqkv, out: None, dgate, norms })
        }))
    }

    /// Starts a chunk without saved state: recomputes its forward pass.
    fn start_recomputed(&self, chunk: &HeadRanges) -> Result<Attend<'_>, LayerError> {
        let ctx = self.pass.ctx();
        let (ws, layout) = (ctx.workspace(), self.layout(chunk)?);
        let QkvHeads { q, k, v, norms, gate } = self.project_heads(chunk)?;
        let forward = ctx.attention().start_forward(q, k, v, &layout, ws)?;
        let (dout, gated) = self.dout(chunk, gate)?;
        let backward = ctx.attention().start_backward(&dout, &layout, ws)?;
        let chunk = chunk.clone();
        Ok(Box::new(move || {
            let (mut inner, out) = forward(())?;
            let out = if ctx.overlaps_exchange() { out } else { Returning::Ready(out.wait()?) };
            let (out, dgate) = match out {
                // The output may share memory with the state that the backward pass consumes.
                Returning::Ready(out) => {
                    let dgate = self.backward_output(&chunk, &out, gated)?;
                    release_output(out, &inner, &self.pass.forward);
                    (None, dgate)
                }
                out => {
                    // The backward pass recycles the state's output, which is still being sent.
                    let copy = ws.alloc(inner.o.dims())?;
                    strided_copy::copy(&inner.o, &copy)?;
                    let sent = std::mem::replace(&mut inner.o, copy);
                    (Some(AwaitedOutput { sent, out, gated }), None)
                }
            };
            let dqkv = backward(inner)?;
            ws.recycle(dout);
            Ok(ReturningGradients { dqkv, out, dgate, norms })
        }))
    }

    /// Waits for a chunk's gradients. Returns those of its q, k and v projections.
    fn finish(
        &self,
        chunk: &HeadRanges,
        returning: ReturningGradients<'_>,
    ) -> Result<[Tensor; 3], LayerError> {
        let Self { module, pass, .. } = self;
        let ReturningGradients { dqkv, out, mut dgate, norms: [q_norm, k_norm, v_norm] } = returning;
        if let Some(AwaitedOutput { sent, out, gated }) = out {
            let out = out.wait()?;
            dgate = self.backward_output(chunk, &out, gated)?;
            pass.forward.recycle([sent, out]);
        }
        let QkvGradients { dq, dk, dv } = dqkv.wait()?;
        module.rotate([&dq, &dk], Direction::Backward, &pass.forward)?;
        let dq = module.q.backward_norm(dq, q_norm, pass)?;
        let dq = match dgate {
            Some(dgate) => columns::join(vec![dq, dgate], pass.forward.workspace())?,
            None => dq,
        };
        let dk = module.k.backward_norm(dk, k_norm, pass)?;
        Ok([dq, dk, module.v.backward_norm(dv, v_norm, pass)?])
    }

    fn layout(&self, chunk: &HeadRanges) -> Result<AttentionLayout, LayerError> {
        self.module.layout(chunk, &self.pass.forward, Some(self.pass))
    }

    fn project_heads(&self, chunk: &HeadRanges) -> Result<QkvHeads, LayerError> {
        self.module.project_heads(self.input, &self.rstd, chunk, &self.pass.forward)
    }

    /// The gradient of a chunk's output, with the gate and the gradient of the gated output if there is one.
    fn dout(
        &self,
        chunk: &HeadRanges,
        gate: Option<Tensor>,
    ) -> Result<(Tensor, Option<GatedOutput>), LayerError> {
        let forward = &self.pass.forward;
        let dout = self.module.q.alloc(&chunk.q, forward)?;
        let o = self.module.o.columns(&self.module.o_inputs(chunk), forward)?;
        o.backward_input(self.dy, &dout.flatten_from(2)?, false)?;
        let Some(gate) = gate else { return Ok((dout, None)) };
        let gated = GatedOutput { gate, dgated: dout };
        Ok((gated.dout(forward)?, Some(gated)))
    }

    /// Adds to the gradient of the output projection. Returns that of the gate, if there is one.
    fn backward_output(
        &self,
        chunk: &HeadRanges,
        out: &Tensor,
        gated: Option<GatedOutput>,
    ) -> Result<Option<Tensor>, LayerError> {
        let Some(gated) = gated else { return self.add_o_gradient(chunk, out).map(|()| None) };
        let forward = &self.pass.forward;
        let output = output_gate::apply(&gated.gate, out, forward)?;
        self.add_o_gradient(chunk, &output)?;
        Ok(Some(gated.dgate(out, output, forward)?))
    }

    /// Adds to the gradients of a chunk's rows of the weights, and to `dnormed`, or overwrites
    /// `dnormed`.
    fn backward_projections(
        &self,
        chunk: &HeadRanges,
        dqkv: [Tensor; 3],
        dnormed: &Tensor,
        accumulates: bool,
    ) -> Result<(), LayerError> {
        let Self { module, input, rstd, pass, .. } = self;
        let forward = &pass.forward;
        let parts = [(&module.q, &chunk.q), (&module.k, &chunk.kv), (&module.v, &chunk.kv)];
        let rows = parts.map(|(projection, heads)| {
            Ok((projection.rows(heads, forward)?, projection.gradient_rows(heads, pass)))
        });
        let rows = rows.into_iter().collect::<Result<Vec<_>, LayerError>>()?;
        let backward = |normed: &Tensor, tile: &Range<usize>| {
            let dx = token_rows(dnormed, tile)?;
            for (index, (dy, (weights, gradients))) in dqkv.iter().zip(&rows).enumerate() {
                let dy = token_rows(dy, tile)?;
                gradients.add(&dy, normed)?;
                weights.backward_input(&dy, &dx, accumulates || index > 0)?;
            }
            Ok(())
        };
        input.for_each_tile(rstd, backward, forward)?;
        forward.recycle(dqkv);
        Ok(())
    }

    /// Adds to the gradient of a chunk's part of the output projection.
    fn add_o_gradient(&self, chunk: &HeadRanges, out: &Tensor) -> Result<(), LayerError> {
        let Self { module, dy, pass, .. } = self;
        let gradients = module.o.gradient_columns(&module.o_inputs(chunk), pass);
        gradients.add(dy, &out.flatten_from(2)?)
    }
}
