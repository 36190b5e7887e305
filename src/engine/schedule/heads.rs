//! The attention half of a layer, in chunks of heads: the counterpart of `model::decoder_attention` and
//! `model::heads`.

use super::attention::Saved;
use super::dims::{Dims, Heads, Tile};
use super::event::{Pass, Piece};
use super::layer::LayerPass;
use super::ledger::{Buffer, ElementType, Ledger};
use crate::model::{HeadWeights, Weights};

/// What is kept of one chunk.
#[derive(Debug)]
pub(super) struct SavedChunk {
    attention: Saved,
    /// The attention's output, unless it is what the attention saved.
    out: Option<Buffer>,
    q_norm: Option<[Buffer; 2]>,
    k_norm: Option<[Buffer; 2]>,
}

impl SavedChunk {
    /// Gives all of it back, for the next chunk.
    fn recycle(self, ledger: &mut Ledger) {
        let Self { attention, out, q_norm, k_norm } = self;
        attention.recycle(ledger);
        let norms = [q_norm, k_norm].into_iter().flatten().flatten();
        out.into_iter().chain(norms).for_each(|buffer| ledger.give(buffer));
    }
}

impl LayerPass<'_> {
    /// The input of the MLP half, and with `keep` what every chunk's backward needs.
    pub(super) fn forward_attention(&mut self, keep: bool, pass: Pass) -> (Buffer, Vec<SavedChunk>) {
        let (x, tokens) = (self.elems(self.dims.hidden), self.dims.tokens());
        let mid = self.take(x);
        self.ledger.sweep(&[x, x], 0, 1);
        let rstd = self.take_f32(tokens);
        let mut kept = Vec::new();
        for chunk in 0..self.dims.chunks.len() {
            let saved = self.attend(chunk, pass);
            let q = self.dims.chunks[chunk].num_heads * self.dims.head_dim;
            self.product_beside(self.dims.all(), (q, self.dims.hidden), self.o_columns_bytes(chunk));
            self.compute(Piece::Projections, pass);
            if keep {
                kept.push(saved);
            } else {
                saved.recycle(self.ledger);
            }
        }
        self.ledger.give(rstd);
        self.trim_after_chunks();
        (mid, kept)
    }

    /// Chunks that were not kept are computed again, one at a time.
    pub(super) fn backward_attention(&mut self, kept: Vec<SavedChunk>, trained: &Weights<bool>) {
        let (x, tokens) = (self.elems(self.dims.hidden), self.dims.tokens());
        let (dnormed, rstd) = (self.take(x), self.take_f32(tokens));
        let mut kept = kept.into_iter();
        for chunk in 0..self.dims.chunks.len() {
            let saved = kept.next().unwrap_or_else(|| self.attend(chunk, Pass::Recompute));
            let dqkv = self.backward_chunk(chunk, saved, trained);
            self.backward_projections(self.dims.chunks[chunk], dqkv, trained);
        }
        self.backward_norm(self.dims.all());
        [dnormed, rstd].into_iter().for_each(|buffer| self.ledger.give(buffer));
        self.trim_after_chunks();
    }

    fn trim_after_chunks(&mut self) {
        if self.dims.chunks.len() > 1 {
            self.ledger.trim();
        }
    }

    fn attend(&mut self, chunk: usize, pass: Pass) -> SavedChunk {
        let heads @ Heads { num_heads, num_kv_heads, .. } = self.dims.chunks[chunk];
        let widths = self.widths(heads);
        let [query, key, value] = widths.map(|width| self.take(self.elems(width)));
        for tile in self.dims.tiles() {
            let normed = self.normalise(tile);
            widths.into_iter().for_each(|width| self.project(tile, width));
            self.ledger.give(normed);
        }
        let (query, q_norm) = self.normalise_heads(query, num_heads);
        let (key, k_norm) = self.normalise_heads(key, num_kv_heads);
        self.rotate(heads);
        self.compute(Piece::Projections, pass);
        let qkv = [query, key, value];
        let (out, attention) = self.attention.forward(chunk, qkv, self.dims, pass, self.ledger);
        SavedChunk { attention, out, q_norm, k_norm }
    }

    /// From the gradient of the half's result to those of q, k and v.
    fn backward_chunk(&mut self, chunk: usize, saved: SavedChunk, trained: &Weights<bool>) -> [Buffer; 3] {
        let heads @ Heads { num_heads, num_kv_heads, .. } = self.dims.chunks[chunk];
        let (hidden, q) = (self.dims.hidden, num_heads * self.dims.head_dim);
        let o_columns_bytes = self.o_columns_bytes(chunk);
        let is_summed_apart = trained.o && o_columns_bytes > 0;
        let part = is_summed_apart.then(|| self.take_f32(hidden * q));
        self.product_for_weight(self.dims.all(), (q, hidden), trained.o);
        part.into_iter().for_each(|part| self.ledger.give(part));
        let dout = self.take(self.elems(q));
        self.product_beside(self.dims.all(), (hidden, q), o_columns_bytes);
        self.compute(Piece::Projections, Pass::Backward);
        let SavedChunk { attention, out, q_norm, k_norm } = saved;
        out.into_iter().for_each(|out| self.ledger.give(out));
        let [dq, dk, dv] = self.attention.backward(chunk, attention, self.dims, self.ledger);
        self.ledger.give(dout);
        self.rotate(heads);
        let dq = self.backward_head_norm(dq, num_heads, q_norm);
        let dk = self.backward_head_norm(dk, num_kv_heads, k_norm);
        [dq, dk, dv]
    }

    fn backward_projections(&mut self, heads: Heads, dqkv: [Buffer; 3], trained: &Weights<bool>) {
        let hidden = self.dims.hidden;
        let projections = self.widths(heads).into_iter().zip([trained.q, trained.k, trained.v]);
        for tile in self.dims.tiles() {
            let normed = self.normalise(tile);
            for (width, trained) in projections.clone() {
                self.backward_head_weights(tile, width, trained);
                self.product(tile, width, hidden);
            }
            self.ledger.give(normed);
        }
        dqkv.into_iter().for_each(|buffer| self.ledger.give(buffer));
        self.compute(Piece::Projections, Pass::Backward);
    }

    /// A projection to heads, with a bias where the family has one.
    fn project(&mut self, tile: Tile, width: usize) {
        if self.dims.has_qkv_bias {
            let ones = self.take(tile.tokens);
            self.product(tile, 1, width);
            self.ledger.give(ones);
        }
        self.product(tile, self.dims.hidden, width);
    }

    fn backward_head_weights(&mut self, tile: Tile, width: usize, trained: HeadWeights<bool>) {
        if trained.bias == Some(true) {
            let ones = self.take(tile.tokens);
            self.product_for_weight(tile, (1, width), true);
            self.ledger.give(ones);
        }
        self.product_for_weight(tile, (self.dims.hidden, width), trained.weight);
    }

    /// The norm of heads, where the family has one.
    fn normalise_heads(&mut self, y: Buffer, heads: usize) -> (Buffer, Option<[Buffer; 2]>) {
        let Dims { head_dim, has_qk_norm, .. } = *self.dims;
        if !has_qk_norm {
            return (y, None);
        }
        let elems = self.elems(heads * head_dim);
        let normed = self.take(elems);
        let rstd = self.take_f32(self.elems(heads));
        self.ledger.sweep(&[elems, head_dim, elems], 0, 1);
        (normed, Some([y, rstd]))
    }

    fn backward_head_norm(&mut self, dy: Buffer, heads: usize, norm: Option<[Buffer; 2]>) -> Buffer {
        let Some([before, rstd]) = norm else { return dy };
        let head_dim = self.dims.head_dim;
        let elems = self.elems(heads * head_dim);
        let dheads = self.take(elems);
        let scratch = self.attention.kernels.norm_backward_bytes(self.elems(heads), head_dim);
        self.ledger.sweep(&[elems, elems, head_dim, elems], scratch, 1);
        [dy, before, rstd].into_iter().for_each(|buffer| self.ledger.give(buffer));
        dheads
    }

    /// The rotary embedding of q and k, or its backward, in place: first the one, then the other.
    fn rotate(&mut self, heads: Heads) {
        let [q, k, _] = self.widths(heads).map(|width| self.elems(width));
        self.ledger.touch(2 * (q + k) * self.ledger.bytes_of(ElementType::Stored));
    }

    /// Numbers that each token has in q, k and v of some heads.
    fn widths(&self, heads: Heads) -> [usize; 3] {
        [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads].map(|heads| heads * self.dims.head_dim)
    }

    /// Bytes of a copy of a chunk's columns of the output projection; none where there is one chunk.
    fn o_columns_bytes(&self, chunk: usize) -> usize {
        let Dims { hidden, num_heads, head_dim, .. } = *self.dims;
        match self.dims.chunks[chunk].num_heads {
            all if all == num_heads => 0,
            some => self.ledger.bytes_of(ElementType::Stored) * hidden * some * head_dim,
        }
    }
}
