//! The backward pass of the attention half, in head chunks.

use super::attention::{token_dims, trim_after_chunks};
use super::chunk_pipeline::run_chunks;
use super::layer::DecoderLayer;
use super::mlp::token_rows;
use super::qkv_projection;
use super::saved_attention::{AttentionSaved, HeadNorms, QkvHeads, shares_output};
use super::weights::Weights;
use crate::model::{HeadChunk, LayerContext, ModelError};
use candle_core::Tensor;
use ulysses_kernels::attention::{self, QkvGradients, Returning, SavedAttention, Upstream};
use ulysses_kernels::rope::Direction;
use ulysses_kernels::strided_copy::{BlockCopy, copy_blocks};
use ulysses_kernels::{elementwise, linear, rms_norm, rope, strided_copy};

/// One backward pass of the attention half.
struct AttentionBackward<'a> {
    layer: &'a DecoderLayer,
    weights: &'a Weights<&'a Tensor>,
    grads: &'a Weights<Option<&'a Tensor>>,
    /// The input of the half.
    x: &'a Tensor,
    /// Reciprocal root mean squares of the tokens of `x`.
    rstd: Tensor,
    /// The gradient of the half's result, which becomes that of `x`.
    dmid: &'a Tensor,
    ctx: &'a LayerContext,
}

/// A chunk's operands on their way. The second step computes its gradients and starts to return them.
type Attend<'p> = Box<dyn FnOnce() -> Result<ReturningGradients<'p>, ModelError> + 'p>;

/// A chunk's gradients on their way back.
struct ReturningGradients<'p> {
    dqkv: Returning<'p, QkvGradients>,
    /// The recomputed output, if the gradient of the output projection still needs it: where it was computed, and
    /// on its way back.
    out: Option<(Tensor, Returning<'p, Tensor>)>,
    norms: HeadNorms,
}

impl DecoderLayer {
    /// Backward of the attention half. `dmid` becomes the gradient of its input `x`.
    pub(super) fn backward_attention(
        &self,
        (weights, grads): (&Weights<&Tensor>, &Weights<Option<&Tensor>>),
        (x, saved_chunks): (&Tensor, Vec<AttentionSaved>),
        dmid: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(), ModelError> {
        let rstd = ctx.workspace().alloc_f32(token_dims(x))?;
        AttentionBackward { layer: self, weights, grads, x, rstd, dmid, ctx }.run(saved_chunks)
    }
}

impl AttentionBackward<'_> {
    /// Adds to the parameters' gradients, and turns `dmid` into the gradient of `x`. A chunk is recomputed as far
    /// as its state is not saved.
    fn run(self, saved_chunks: Vec<AttentionSaved>) -> Result<(), ModelError> {
        let ws = self.ctx.workspace();
        let dnormed = ws.alloc(self.x.dims())?;
        let mut saved_chunks = saved_chunks.into_iter();
        let mut accumulates = false;
        run_chunks(
            &self.layer.head_chunks(self.ctx)?,
            self.ctx.overlaps_exchange(),
            |chunk| match saved_chunks.next() {
                Some(AttentionSaved::Whole { inner, out, norms }) => {
                    self.start_saved(chunk, inner, out, norms)
                }
                Some(AttentionSaved::Output { out, lse }) => self.start_from_output(chunk, out, lse),
                None => self.start_recomputed(chunk),
            },
            |_, attend| attend(),
            |chunk, returning| {
                let dqkv = self.finish(chunk, returning)?;
                self.backward_projections(chunk, (dqkv, std::mem::replace(&mut accumulates, true)), &dnormed)
            },
        )?;
        let Self { weights, grads, x, rstd, dmid, ctx, .. } = self;
        rms_norm::backward(&dnormed, x, weights.input_norm, &rstd, dmid, true, grads.input_norm)?;
        [dnormed, rstd].into_iter().for_each(|tensor| ws.recycle(tensor));
        trim_after_chunks(ctx);
        Ok(())
    }

    /// Starts a chunk with its whole state.
    fn start_saved(
        &self,
        chunk: &HeadChunk,
        inner: SavedAttention,
        out: Tensor,
        norms: HeadNorms,
    ) -> Result<Attend<'_>, ModelError> {
        let (ws, layout) = (self.ctx.workspace(), self.layer.layout(chunk, self.ctx)?);
        self.add_o_gradient(chunk, &out)?;
        let dout = self.dout(chunk)?;
        self.release(out, &inner);
        let attend = self.ctx.attention().start_backward(&dout, &layout, ws)?;
        Ok(Box::new(move || {
            let dqkv = attend(inner)?;
            ws.recycle(dout);
            Ok(ReturningGradients { dqkv, out: None, norms })
        }))
    }

    /// Starts a chunk of which the output is saved: recomputes q, k and v.
    fn start_from_output(
        &self,
        chunk: &HeadChunk,
        out: Tensor,
        lse: Tensor,
    ) -> Result<Attend<'_>, ModelError> {
        let (ws, layout) = (self.ctx.workspace(), self.layer.layout(chunk, self.ctx)?);
        self.add_o_gradient(chunk, &out)?;
        let dout = self.dout(chunk)?;
        let (batch, tokens, heads, _) = out.dims4()?;
        let delta = ws.alloc_f32((batch, heads, tokens))?;
        attention::delta(&out, &dout, &delta)?;
        ws.recycle(out);
        let QkvHeads { q, k, v, norms } = self.project_heads(chunk)?;
        let upstream = Upstream { dout: &dout, lse: &lse, delta: &delta };
        let attend = self.ctx.attention().start_backward_recomputed(q, k, v, &upstream, &layout, ws)?;
        Ok(Box::new(move || {
            let dqkv = attend(())?;
            [lse, delta, dout].into_iter().for_each(|tensor| ws.recycle(tensor));
            Ok(ReturningGradients { dqkv, out: None, norms })
        }))
    }

    /// Starts a chunk without saved state: recomputes its forward pass.
    fn start_recomputed(&self, chunk: &HeadChunk) -> Result<Attend<'_>, ModelError> {
        let (ws, layout) = (self.ctx.workspace(), self.layer.layout(chunk, self.ctx)?);
        let QkvHeads { q, k, v, norms } = self.project_heads(chunk)?;
        let forward = self.ctx.attention().start_forward(q, k, v, &layout, ws)?;
        let dout = self.dout(chunk)?;
        let backward = self.ctx.attention().start_backward(&dout, &layout, ws)?;
        let chunk = chunk.clone();
        Ok(Box::new(move || {
            let (mut inner, out) = forward(())?;
            let out = if self.ctx.overlaps_exchange() { out } else { Returning::Ready(out.wait()?) };
            let out = match out {
                // The output may share memory with the state that the backward pass consumes.
                Returning::Ready(out) => {
                    self.add_o_gradient(&chunk, &out)?;
                    self.release(out, &inner);
                    None
                }
                under_way => {
                    // The backward pass recycles the state's output, which is still being sent.
                    let copy = ws.alloc(inner.o.dims())?;
                    strided_copy::copy(&inner.o, &copy)?;
                    Some((std::mem::replace(&mut inner.o, copy), under_way))
                }
            };
            let dqkv = backward(inner)?;
            ws.recycle(dout);
            Ok(ReturningGradients { dqkv, out, norms })
        }))
    }

    /// Waits for a chunk's gradients. Returns those of its q, k and v projections.
    fn finish(
        &self,
        chunk: &HeadChunk,
        returning: ReturningGradients<'_>,
    ) -> Result<[Tensor; 3], ModelError> {
        let Self { layer, weights, grads, ctx, .. } = self;
        let ReturningGradients { dqkv, out, norms: [q_norm, k_norm] } = returning;
        if let Some((sent, out)) = out {
            let out = out.wait()?;
            self.add_o_gradient(chunk, &out)?;
            [sent, out].into_iter().for_each(|tensor| ctx.workspace().recycle(tensor));
        }
        let (dq, dk, dv) = dqkv.wait()?;
        let table = ctx.rope(layer.config.head_dim, layer.config.rope())?;
        rope::apply(&dq, &table, Direction::Backward)?;
        rope::apply(&dk, &table, Direction::Backward)?;
        let dq = qkv_projection::backward_norm(dq, weights.q.norm, grads.q.norm.flatten(), q_norm, ctx)?;
        let dk = qkv_projection::backward_norm(dk, weights.k.norm, grads.k.norm.flatten(), k_norm, ctx)?;
        Ok([dq, dk, dv])
    }

    fn project_heads(&self, chunk: &HeadChunk) -> Result<QkvHeads, ModelError> {
        self.layer.project_heads(self.weights, chunk, (self.x, &self.rstd), self.ctx)
    }

    /// The gradient of a chunk's output.
    fn dout(&self, chunk: &HeadChunk) -> Result<Tensor, ModelError> {
        let Self { layer, weights, x, dmid, ctx, .. } = self;
        let (batch, tokens) = token_dims(x);
        let dout = ctx.workspace().alloc((batch, tokens, chunk.q.len(), layer.config.head_dim))?;
        linear::backward_input(dmid, &layer.o_columns(weights.o, chunk)?, &dout.flatten_from(2)?, false)?;
        Ok(dout)
    }

    /// Recycles an output, unless the attention state has the same tensor: the attention may free that one, so
    /// nobody else must hold it.
    fn release(&self, out: Tensor, inner: &SavedAttention) {
        match shares_output(inner, &out) {
            true => drop(out),
            false => self.ctx.workspace().recycle(out),
        }
    }

    /// Adds to the gradients of a chunk's rows of the weights, and to `dnormed`; the first chunk overwrites
    /// `dnormed`.
    fn backward_projections(
        &self,
        chunk: &HeadChunk,
        (dqkv, accumulates): ([Tensor; 3], bool),
        dnormed: &Tensor,
    ) -> Result<(), ModelError> {
        let Self { layer, weights, grads, x, rstd, ctx, .. } = self;
        let (weights_of, grads_of) = (layer.qkv_rows(weights, chunk)?, layer.qkv_rows(grads, chunk)?);
        for tile in ctx.token_tiles() {
            let (x, rstd) = (token_rows(x, &tile)?, token_rows(rstd, &tile)?);
            let normed = layer.normalize(&x, weights.input_norm, &rstd, ctx)?;
            for (index, dy) in dqkv.iter().enumerate() {
                let (dy, dx) = (token_rows(dy, &tile)?, token_rows(dnormed, &tile)?);
                qkv_projection::backward_weight(&dy, &normed, &grads_of[index], ctx)?;
                linear::backward_input(&dy, &weights_of[index].weight, &dx, accumulates || index > 0)?;
            }
            ctx.workspace().recycle(normed);
        }
        dqkv.into_iter().for_each(|tensor| ctx.workspace().recycle(tensor));
        Ok(())
    }

    /// Adds `dmidᵀ · out` to a chunk's columns of the output projection's gradient, unless it is frozen.
    fn add_o_gradient(&self, chunk: &HeadChunk, out: &Tensor) -> Result<(), ModelError> {
        let Self { layer, dmid, ctx, .. } = self;
        let Some(gradient) = self.grads.o else { return Ok(()) };
        let out = out.flatten_from(2)?;
        if chunk.q.len() == layer.config.num_heads {
            return Ok(linear::backward_weight(dmid, &out, gradient)?);
        }
        let [packed, within] = layer.o_blocks(chunk);
        let part = ctx.workspace().alloc_f32((packed.rows, packed.run))?;
        elementwise::fill(&part, 0.0)?;
        linear::backward_weight(dmid, &out, &part)?;
        copy_blocks(&[&part], &[gradient], &[BlockCopy { from: packed, to: within, accumulate: true }])?;
        ctx.workspace().recycle(part);
        Ok(())
    }
}
