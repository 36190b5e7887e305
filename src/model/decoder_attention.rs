//! The attention half of the decoder block, in head chunks.
//!
//! With `head_chunks`, one chunk of heads runs at a time. Queries, keys, values and output of the whole
//! sequence then exist for one chunk only, and so do the buffers of the exchange (the idea of UPipe). Chunks
//! consist of whole KV heads; each uses its own rows of the weights.

use super::decoder::DecoderLayer;
use super::decoder_mlp::token_rows;
use super::decoder_weights::{HeadRows, View, Weights};
use super::qkv_projection;
use super::saved_attention::{AttentionSaved, QkvHeads, shares_output};
use super::{HeadChunk, LayerContext, LlamaConfig, ModelError};
use candle_core::Tensor;
use ulysses_kernels::attention::{self, AttentionLayout, Upstream};
use ulysses_kernels::rope::Direction;
use ulysses_kernels::strided_copy::{BlockCopy, StridedBlock, copy_blocks};
use ulysses_kernels::{elementwise, linear, rms_norm, rope, strided_copy};

impl DecoderLayer {
    /// Computes `x + o_proj(attention(norm(x)))`, and passes every chunk's state to `keep`.
    pub(super) fn forward_attention(
        &self,
        weights: &Weights<&Tensor>,
        x: &Tensor,
        ctx: &LayerContext,
        mut keep: impl FnMut(AttentionSaved),
    ) -> Result<Tensor, ModelError> {
        let ws = ctx.workspace();
        let mid = ws.alloc(x.dims())?;
        strided_copy::copy(x, &mid)?;
        let rstd = ws.alloc_f32(token_dims(x))?;
        for chunk in self.head_chunks(ctx)? {
            let saved = self.attend(weights, &chunk, (x, &rstd), ctx)?;
            self.add_projection(weights, &chunk, saved.out(), &mid)?;
            keep(saved);
        }
        ws.recycle(rstd);
        trim_after_chunks(ctx);
        Ok(mid)
    }

    /// The result of [`forward_attention`](Self::forward_attention), from the saved outputs of all chunks.
    pub(super) fn forward_projection(
        &self,
        weights: &Weights<&Tensor>,
        x: &Tensor,
        saved_chunks: &[AttentionSaved],
        ctx: &LayerContext,
    ) -> Result<Tensor, ModelError> {
        let mid = ctx.workspace().alloc(x.dims())?;
        strided_copy::copy(x, &mid)?;
        for (chunk, saved) in self.head_chunks(ctx)?.iter().zip(saved_chunks) {
            self.add_projection(weights, chunk, saved.out(), &mid)?;
        }
        Ok(mid)
    }

    /// Backward of the attention half. `dmid` becomes the gradient of its input `x`. Chunks are recomputed one
    /// at a time, as far as their state is not saved.
    pub(super) fn backward_attention(
        &self,
        weights: &Weights<&Tensor>,
        grads: &Weights<Option<&Tensor>>,
        (x, saved_chunks): (&Tensor, Vec<AttentionSaved>),
        dmid: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(), ModelError> {
        let ws = ctx.workspace();
        let (dnormed, rstd) = (ws.alloc(x.dims())?, ws.alloc_f32(token_dims(x))?);
        let mut saved_chunks = saved_chunks.into_iter();
        for (index, chunk) in self.head_chunks(ctx)?.into_iter().enumerate() {
            let saved = match saved_chunks.next() {
                Some(saved) => saved,
                None => self.attend(weights, &chunk, (x, &rstd), ctx)?,
            };
            let dqkv = self.backward_chunk((weights, grads), &chunk, saved, (x, &rstd), dmid, ctx)?;
            self.backward_projections(
                (weights, grads),
                &chunk,
                (x, &rstd),
                (dqkv, index > 0),
                &dnormed,
                ctx,
            )?;
        }
        rms_norm::backward(&dnormed, x, weights.input_norm, &rstd, dmid, true, grads.input_norm)?;
        [dnormed, rstd].into_iter().for_each(|tensor| ws.recycle(tensor));
        trim_after_chunks(ctx);
        Ok(())
    }

    /// Adds a chunk's part of the output projection to `mid`.
    fn add_projection(
        &self,
        weights: &Weights<&Tensor>,
        chunk: &HeadChunk,
        out: &Tensor,
        mid: &Tensor,
    ) -> Result<(), ModelError> {
        Ok(linear::forward(&out.flatten_from(2)?, &self.o_columns(weights.o, chunk)?, mid, true)?)
    }

    /// Attention of one chunk. Writes the tokens' reciprocal root mean squares to `rstd`.
    fn attend(
        &self,
        weights: &Weights<&Tensor>,
        chunk: &HeadChunk,
        (x, rstd): (&Tensor, &Tensor),
        ctx: &LayerContext,
    ) -> Result<AttentionSaved, ModelError> {
        let QkvHeads { q, k, v, norms } = self.project_heads(weights, chunk, (x, rstd), ctx)?;
        let (out, inner) = ctx.attention().forward(q, k, v, &self.layout(chunk, ctx)?, ctx.workspace())?;
        Ok(AttentionSaved::Whole { inner, out, norms })
    }

    /// Queries, keys and values of one chunk. Writes the tokens' reciprocal root mean squares to `rstd`.
    fn project_heads(
        &self,
        weights: &Weights<&Tensor>,
        chunk: &HeadChunk,
        (x, rstd): (&Tensor, &Tensor),
        ctx: &LayerContext,
    ) -> Result<QkvHeads, ModelError> {
        let LlamaConfig { head_dim, rms_norm_eps, .. } = self.config;
        let [wq, wk, wv] = self.qkv_rows(weights, chunk)?;
        let projected = [&wq, &wk, &wv].map(|weights| qkv_projection::alloc_heads(weights, head_dim, ctx));
        let [q, k, v] = projected;
        let (q, k, v) = (q?, k?, v?);
        for tile in ctx.token_tiles() {
            let normed =
                self.normalize(&token_rows(x, &tile)?, weights.input_norm, &token_rows(rstd, &tile)?, ctx)?;
            for (weights, y) in [(&wq, &q), (&wk, &k), (&wv, &v)] {
                qkv_projection::project(&normed, weights, &token_rows(y, &tile)?, ctx)?;
            }
            ctx.workspace().recycle(normed);
        }
        let (q, q_norm) = qkv_projection::normalize(q, weights.q.norm, rms_norm_eps, ctx)?;
        let (k, k_norm) = qkv_projection::normalize(k, weights.k.norm, rms_norm_eps, ctx)?;
        let table = ctx.rope(head_dim, self.config.rope())?;
        rope::apply(&q, &table, Direction::Forward)?;
        rope::apply(&k, &table, Direction::Forward)?;
        Ok(QkvHeads { q, k, v, norms: [q_norm, k_norm] })
    }

    /// From the gradient of the half's result to those of a chunk's q, k and v projections.
    fn backward_chunk(
        &self,
        (weights, grads): (&Weights<&Tensor>, &Weights<Option<&Tensor>>),
        chunk: &HeadChunk,
        saved: AttentionSaved,
        (x, rstd): (&Tensor, &Tensor),
        dmid: &Tensor,
        ctx: &LayerContext,
    ) -> Result<[Tensor; 3], ModelError> {
        let (ws, layout) = (ctx.workspace(), self.layout(chunk, ctx)?);
        if let Some(gradient) = grads.o {
            self.add_o_gradient(gradient, chunk, (dmid, saved.out()), ctx)?;
        }
        let dout = ws.alloc(saved.out().dims())?;
        linear::backward_input(dmid, &self.o_columns(weights.o, chunk)?, &dout.flatten_from(2)?, false)?;
        let ((dq, dk, dv), [q_norm, k_norm]) = match saved {
            AttentionSaved::Whole { inner, out, norms } => {
                // The attention may free tensors that it no longer needs, so this function must not hold them.
                match shares_output(&inner, &out) {
                    true => drop(out),
                    false => ws.recycle(out),
                }
                (ctx.attention().backward(inner, &dout, &layout, ws)?, norms)
            }
            AttentionSaved::Output { out, lse } => {
                let (batch, tokens, heads, _) = out.dims4()?;
                let delta = ws.alloc_f32((batch, heads, tokens))?;
                attention::delta(&out, &dout, &delta)?;
                ws.recycle(out);
                let QkvHeads { q, k, v, norms } = self.project_heads(weights, chunk, (x, rstd), ctx)?;
                let upstream = Upstream { dout: &dout, lse: &lse, delta: &delta };
                let gradients = ctx.attention().backward_recomputed(q, k, v, &upstream, &layout, ws)?;
                [lse, delta].into_iter().for_each(|tensor| ws.recycle(tensor));
                (gradients, norms)
            }
        };
        ws.recycle(dout);
        let table = ctx.rope(self.config.head_dim, self.config.rope())?;
        rope::apply(&dq, &table, Direction::Backward)?;
        rope::apply(&dk, &table, Direction::Backward)?;
        let dq = qkv_projection::backward_norm(dq, weights.q.norm, grads.q.norm.flatten(), q_norm, ctx)?;
        let dk = qkv_projection::backward_norm(dk, weights.k.norm, grads.k.norm.flatten(), k_norm, ctx)?;
        Ok([dq, dk, dv])
    }

    /// Adds to the gradients of a chunk's rows of the weights, and to `dnormed`; the first chunk overwrites
    /// `dnormed`.
    fn backward_projections(
        &self,
        (weights, grads): (&Weights<&Tensor>, &Weights<Option<&Tensor>>),
        chunk: &HeadChunk,
        (x, rstd): (&Tensor, &Tensor),
        (dqkv, accumulate): ([Tensor; 3], bool),
        dnormed: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(), ModelError> {
        let (weights_of, grads_of) = (self.qkv_rows(weights, chunk)?, self.qkv_rows(grads, chunk)?);
        for tile in ctx.token_tiles() {
            let normed =
                self.normalize(&token_rows(x, &tile)?, weights.input_norm, &token_rows(rstd, &tile)?, ctx)?;
            for (index, dy) in dqkv.iter().enumerate() {
                let (dy, dx) = (token_rows(dy, &tile)?, token_rows(dnormed, &tile)?);
                qkv_projection::backward_weight(&dy, &normed, &grads_of[index], ctx)?;
                linear::backward_input(&dy, &weights_of[index].weight, &dx, accumulate || index > 0)?;
            }
            ctx.workspace().recycle(normed);
        }
        dqkv.into_iter().for_each(|tensor| ctx.workspace().recycle(tensor));
        Ok(())
    }

    /// The chunks, as even as KV heads allow.
    fn head_chunks(&self, ctx: &LayerContext) -> Result<Vec<HeadChunk>, ModelError> {
        let num_kv_heads = self.config.num_kv_heads;
        let chunks = ctx.tiling().head_chunks;
        if chunks == 0 || chunks > num_kv_heads {
            return Err(ModelError::HeadChunks { layer: self.name.clone(), chunks, num_kv_heads });
        }
        Ok(self.config.head_chunks(chunks))
    }

    /// The attention layout of a chunk.
    fn layout(&self, chunk: &HeadChunk, ctx: &LayerContext) -> Result<AttentionLayout, ModelError> {
        let window = self.config.architecture.sliding_window();
        ctx.windowed_attention_layout(chunk.q.len(), chunk.kv.len(), window)
    }

    /// A chunk's rows of the three projections, or of their gradients.
    fn qkv_rows<T: View>(
        &self,
        weights: &Weights<T>,
        chunk: &HeadChunk,
    ) -> Result<[HeadRows<T::Rows>; 3], ModelError> {
        let head_dim = self.config.head_dim;
        Ok([
            weights.q.heads(&chunk.q, head_dim)?,
            weights.k.heads(&chunk.kv, head_dim)?,
            weights.v.heads(&chunk.kv, head_dim)?,
        ])
    }

    /// A chunk's columns of the output projection: the weight itself if there is one chunk, otherwise a copy.
    fn o_columns(&self, o: &Tensor, chunk: &HeadChunk) -> Result<Tensor, ModelError> {
        let head_dim = self.config.head_dim;
        let columns = o.narrow(1, chunk.q.start * head_dim, chunk.q.len() * head_dim)?;
        Ok(ulysses_kernels::tensor::contiguous(&columns)?)
    }

    /// Adds `dmidᵀ · out` to a chunk's columns of the output projection's gradient.
    fn add_o_gradient(
        &self,
        gradient: &Tensor,
        chunk: &HeadChunk,
        (dmid, out): (&Tensor, &Tensor),
        ctx: &LayerContext,
    ) -> Result<(), ModelError> {
        let out = out.flatten_from(2)?;
        if chunk.q.len() == self.config.num_heads {
            return Ok(linear::backward_weight(dmid, &out, gradient)?);
        }
        let (hidden, columns) = gradient.dims2()?;
        let run = chunk.q.len() * self.config.head_dim;
        let part = ctx.workspace().alloc_f32((hidden, run))?;
        elementwise::fill(&part, 0.0)?;
        linear::backward_weight(dmid, &out, &part)?;
        let packed = StridedBlock {
            tensor: 0,
            offset: 0,
            batch: 1,
            batch_stride: 0,
            rows: hidden,
            row_stride: run,
            run,
        };
        let offset = chunk.q.start * self.config.head_dim;
        let strided = StridedBlock { offset, row_stride: columns, ..packed.clone() };
        copy_blocks(&[&part], &[gradient], &[BlockCopy { from: packed, to: strided, accumulate: true }])?;
        ctx.workspace().recycle(part);
        Ok(())
    }
}

/// `(batch, seq_local)` of a hidden state.
fn token_dims(x: &Tensor) -> (usize, usize) {
    (x.dims()[0], x.dims()[1])
}

/// Frees the chunks' working memory, which the MLP cannot use. Head chunks mean that memory is short.
fn trim_after_chunks(ctx: &LayerContext) {
    if ctx.tiling().head_chunks > 1 {
        ctx.workspace().trim();
    }
}
