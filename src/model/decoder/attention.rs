//! The attention half of the decoder block, in head chunks: the forward pass, and what both passes use.
//!
//! With `head_chunks`, one chunk of heads is attended at a time. Queries, keys, values and output of the whole
//! sequence then exist for one chunk only, and so do the buffers of the exchange (the idea of UPipe); for up to
//! three chunks if the exchange [overlaps](super::chunk_pipeline). Chunks consist of whole KV heads; each uses
//! its own rows of the weights.

use super::chunk_pipeline::run_chunks;
use super::layer::DecoderLayer;
use super::mlp::token_rows;
use super::qkv_projection;
use super::saved_attention::{AttentionSaved, QkvHeads, ReturningChunk, Saves};
use super::weights::{HeadRows, View, Weights};
use crate::model::{HeadChunk, LayerContext, LlamaConfig, ModelError};
use candle_core::Tensor;
use ulysses_kernels::attention::AttentionLayout;
use ulysses_kernels::rope::Direction;
use ulysses_kernels::strided_copy::{self, BlockCopy, StridedBlock, copy_blocks};
use ulysses_kernels::{linear, rope, tensor};

impl DecoderLayer {
    /// Computes `x + o_proj(attention(norm(x)))`, and passes every chunk's state to `keep`: all of it, or that of
    /// a checkpoint.
    pub(super) fn forward_attention(
        &self,
        weights: &Weights<&Tensor>,
        x: &Tensor,
        ctx: &LayerContext,
        saves: Saves,
        mut keep: impl FnMut(AttentionSaved),
    ) -> Result<Tensor, ModelError> {
        let ws = ctx.workspace();
        let mid = ws.alloc(x.dims())?;
        strided_copy::copy(x, &mid)?;
        let rstd = ws.alloc_f32(token_dims(x))?;
        run_chunks(
            &self.head_chunks(ctx)?,
            ctx.overlaps_exchange(),
            |chunk| {
                let QkvHeads { q, k, v, norms } = self.project_heads(weights, chunk, (x, &rstd), ctx)?;
                Ok((ctx.attention().start_forward(q, k, v, &self.layout(chunk, ctx)?, ws)?, norms))
            },
            |_, (attend, norms)| {
                let (inner, out) = attend(())?;
                let mut chunk = ReturningChunk::new(inner, norms, out);
                if saves == Saves::Checkpoint {
                    chunk.recycle_qkv(ctx);
                }
                Ok(chunk)
            },
            |chunk, returning| {
                let saved = returning.finish(ctx)?;
                self.add_projection(weights, chunk, saved.out(), &mid)?;
                keep(saved);
                Ok::<_, ModelError>(())
            },
        )?;
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

    /// Queries, keys and values of one chunk. Writes the tokens' reciprocal root mean squares to `rstd`.
    pub(super) fn project_heads(
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

    /// The chunks, as even as KV heads allow.
    pub(super) fn head_chunks(&self, ctx: &LayerContext) -> Result<Vec<HeadChunk>, ModelError> {
        let num_kv_heads = self.config.num_kv_heads;
        let chunks = ctx.tiling().head_chunks;
        if chunks == 0 || chunks > num_kv_heads {
            return Err(ModelError::HeadChunks { layer: self.name.clone(), chunks, num_kv_heads });
        }
        Ok(self.config.head_chunks(chunks))
    }

    /// The attention layout of a chunk.
    pub(super) fn layout(
        &self,
        chunk: &HeadChunk,
        ctx: &LayerContext,
    ) -> Result<AttentionLayout, ModelError> {
        let window = self.config.architecture.sliding_window();
        ctx.windowed_attention_layout(chunk.q.len(), chunk.kv.len(), window)
    }

    /// A chunk's rows of the three projections, or of their gradients.
    pub(super) fn qkv_rows<T: View>(
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
    pub(super) fn o_columns(&self, o: &Tensor, chunk: &HeadChunk) -> Result<Tensor, ModelError> {
        if chunk.q.len() == self.config.num_heads {
            return Ok(o.clone());
        }
        let [packed, within] = self.o_blocks(chunk);
        let columns = tensor::empty((packed.rows, packed.run), o.dtype(), o.device())?;
        // candle would load its kernel for such a copy at the first use, while the exchange of another chunk may be
        // under way, and loading may wait for it.
        copy_blocks(&[o], &[&columns], &[BlockCopy { from: within, to: packed, accumulate: false }])?;
        Ok(columns)
    }

    /// A chunk's columns of the output projection: as a matrix of their own, and within the whole one.
    pub(super) fn o_blocks(&self, chunk: &HeadChunk) -> [StridedBlock; 2] {
        let LlamaConfig { hidden_size: rows, num_heads, head_dim, .. } = self.config;
        let run = chunk.q.len() * head_dim;
        let packed =
            StridedBlock { tensor: 0, offset: 0, batch: 1, batch_stride: 0, rows, row_stride: run, run };
        let offset = chunk.q.start * head_dim;
        let within = StridedBlock { offset, row_stride: num_heads * head_dim, ..packed.clone() };
        [packed, within]
    }
}

/// `(batch, seq_local)` of a hidden state.
pub(super) fn token_dims(x: &Tensor) -> (usize, usize) {
    (x.dims()[0], x.dims()[1])
}

/// Frees the chunks' working memory, which the MLP cannot use. Head chunks mean that memory is short.
pub(super) fn trim_after_chunks(ctx: &LayerContext) {
    if ctx.tiling().head_chunks > 1 {
        ctx.workspace().trim();
    }
}
