//! A decoder layer: the counterpart of [`DecoderLayer`](crate::model::DecoderLayer), tensor by tensor.

use super::attention::{Saved, SequenceParallel};
use super::dims::Dims;
use super::event::{Category::Activations, Event, Pass, Piece, Work};
use super::ledger::{Buffer, Element, Ledger};
use crate::ops::rms_norm;

/// Terms that a product adds up at a time, and so how long the pieces are that its operands are packed into.
const PACKED_TERMS: usize = 512;
/// Rows up to which a weight is packed at once (the gemm crate: twice eight panels of 48).
const MAX_PACKED_ROWS: usize = 768;

/// What a layer keeps for its backward pass, but for its input.
#[derive(Debug)]
pub(super) struct SavedLayer {
    rstd_x: Buffer,
    attention: Saved,
    /// The attention's output, unless it is what the attention saved.
    out: Option<Buffer>,
    q_norm: Option<[Buffer; 2]>,
    k_norm: Option<[Buffer; 2]>,
    mid: Buffer,
    rstd_mid: Buffer,
    gate: Buffer,
    up: Buffer,
}

impl SavedLayer {
    /// All of it, when the layer is to be recomputed.
    pub(super) fn drop_state(self, ledger: &mut Ledger) {
        let Self { rstd_x, attention, out, q_norm, k_norm, mid, rstd_mid, gate, up } = self;
        attention.drop_state(ledger);
        let norms = [q_norm, k_norm].into_iter().flatten().flatten();
        let buffers = [rstd_x, mid, rstd_mid, gate, up].into_iter().chain(out).chain(norms);
        buffers.for_each(|buffer| ledger.free(buffer));
    }
}

/// The layers' sizes and the services that they share, as in a forward or backward pass.
pub(super) struct LayerPass<'a> {
    pub(super) dims: &'a Dims,
    pub(super) attention: &'a mut SequenceParallel,
    pub(super) ledger: &'a mut Ledger,
}

impl LayerPass<'_> {
    /// The layer's output, and what its backward needs.
    pub(super) fn forward(&mut self, pass: Pass) -> (Buffer, SavedLayer) {
        let Dims { hidden, intermediate, num_heads, num_kv_heads, head_dim, .. } = *self.dims;
        let (x, f, q) = (self.elems(hidden), self.elems(intermediate), num_heads * head_dim);
        let (normed, rstd_x) = self.normalise();
        let (query, q_norm) = self.project_to_heads(num_heads, true);
        let (key, k_norm) = self.project_to_heads(num_kv_heads, true);
        let (value, _) = self.project_to_heads(num_kv_heads, false);
        self.ledger.give(normed);
        self.ledger.operate(&[self.elems(q)], 0);
        self.compute(Piece::Projections, pass, self.projection_flops());
        let (out, attention) = self.attention.forward([query, key, value], self.dims, pass, self.ledger);
        let mid = self.take(x);
        self.ledger.operate(&[x, x], 0);
        self.product(q, hidden);
        let (normed, rstd_mid) = self.normalise();
        let gate = self.take(f);
        self.product(hidden, intermediate);
        let up = self.take(f);
        self.product(hidden, intermediate);
        self.ledger.give(normed);
        let product = self.take(f);
        self.ledger.operate(&[f, f, f], 0);
        let y = self.take(x);
        self.ledger.operate(&[x, x], 0);
        self.product(intermediate, hidden);
        self.ledger.give(product);
        self.compute(Piece::Mlp, pass, self.mlp_flops());
        (y, SavedLayer { rstd_x, attention, out, q_norm, k_norm, mid, rstd_mid, gate, up })
    }

    /// The gradient of the output becomes that of the input.
    pub(super) fn backward(&mut self, saved: SavedLayer) {
        let SavedLayer { rstd_x, attention, out, q_norm, k_norm, mid, rstd_mid, gate, up } = saved;
        self.backward_mlp([mid, rstd_mid, gate, up]);
        let Dims { hidden, num_heads, num_kv_heads, head_dim, .. } = *self.dims;
        let q = num_heads * head_dim;
        self.product_for_weight(q, hidden);
        let dout = self.take(self.elems(q));
        self.product(hidden, q);
        let ([dq, dk, dv], saved_out) = self.attention.backward(attention, self.dims, self.ledger);
        self.ledger.give(dout);
        out.or(saved_out).into_iter().for_each(|out| self.ledger.give(out));
        self.ledger.operate(&[self.elems(q)], 0);
        let (dnormed, rstd_again) = self.normalise();
        let dq = self.backward_head_weights(dq, num_heads, q_norm);
        let dk = self.backward_head_weights(dk, num_kv_heads, k_norm);
        let dv = self.backward_head_weights(dv, num_kv_heads, None);
        for (gradient, heads) in [(dq, num_heads), (dk, num_kv_heads), (dv, num_kv_heads)] {
            self.product(heads * head_dim, hidden);
            self.ledger.give(gradient);
        }
        self.backward_norm();
        [dnormed, rstd_again, rstd_x].into_iter().for_each(|buffer| self.ledger.give(buffer));
        self.compute(Piece::Projections, Pass::Backward, 2.0 * self.projection_flops());
    }

    fn backward_mlp(&mut self, [mid, rstd, gate, up]: [Buffer; 4]) {
        let Dims { hidden, intermediate, .. } = *self.dims;
        let f = self.elems(intermediate);
        let product = self.take(f);
        self.ledger.operate(&[f, f, f], 0);
        self.product_for_weight(intermediate, hidden);
        self.product(hidden, intermediate);
        let (dgate, dup) = (self.take(f), self.take(f));
        self.ledger.operate(&[f; 5], 0);
        [product, gate, up].into_iter().for_each(|buffer| self.ledger.give(buffer));
        let (dnormed, rstd_again) = self.normalise();
        for _ in 0..2 {
            self.product_for_weight(hidden, intermediate);
        }
        for _ in 0..2 {
            self.product(intermediate, hidden);
        }
        self.backward_norm();
        let used = [dgate, dup, dnormed, rstd_again, rstd, mid];
        used.into_iter().for_each(|buffer| self.ledger.give(buffer));
        self.compute(Piece::Mlp, Pass::Backward, 2.0 * self.mlp_flops());
    }

    /// A projection to heads, with a bias or a norm where the family has one.
    fn project_to_heads(&mut self, heads: usize, can_be_normed: bool) -> (Buffer, Option<[Buffer; 2]>) {
        let Dims { hidden, head_dim, has_qkv_bias, has_qk_norm, .. } = *self.dims;
        let elems = self.elems(heads * head_dim);
        let y = self.take(elems);
        if has_qkv_bias {
            let ones = self.take(self.dims.tokens());
            self.product(1, heads * head_dim);
            self.ledger.give(ones);
        }
        self.product(hidden, heads * head_dim);
        if !(has_qk_norm && can_be_normed) {
            return (y, None);
        }
        let normed = self.take(elems);
        let rstd = self.ledger.take(Activations, Element::F32, self.elems(heads));
        self.ledger.operate(&[elems, head_dim, elems], 0);
        (normed, Some([y, rstd]))
    }

    fn backward_head_weights(&mut self, dy: Buffer, heads: usize, norm: Option<[Buffer; 2]>) -> Buffer {
        let Dims { hidden, head_dim, has_qkv_bias, .. } = *self.dims;
        let elems = self.elems(heads * head_dim);
        let dy = match norm {
            None => dy,
            Some([before, rstd]) => {
                let dheads = self.take(elems);
                let scratch = rms_norm::backward_scratch_bytes(self.elems(heads), head_dim);
                self.ledger.operate(&[elems, elems, head_dim, elems], scratch);
                [dy, before, rstd].into_iter().for_each(|buffer| self.ledger.give(buffer));
                dheads
            }
        };
        if has_qkv_bias {
            let ones = self.take(self.dims.tokens());
            self.product_for_weight(1, heads * head_dim);
            self.ledger.give(ones);
        }
        self.product_for_weight(hidden, heads * head_dim);
        dy
    }

    /// The residual stream normalised, with its statistics.
    pub(super) fn normalise(&mut self) -> (Buffer, Buffer) {
        let (hidden, x) = (self.dims.hidden, self.elems(self.dims.hidden));
        let y = self.take(x);
        let rstd = self.take_f32(self.dims.tokens());
        self.ledger.operate(&[x, hidden, x], 0);
        (y, rstd)
    }

    pub(super) fn backward_norm(&mut self) {
        let (hidden, x) = (self.dims.hidden, self.elems(self.dims.hidden));
        let scratch = rms_norm::backward_scratch_bytes(self.dims.tokens(), hidden);
        self.ledger.operate(&[x, x, hidden, x], scratch);
    }

    /// A product of every token's `inputs` numbers with a weight.
    fn product(&mut self, inputs: usize, outputs: usize) {
        let packed = if outputs <= MAX_PACKED_ROWS { inputs.min(PACKED_TERMS) * outputs } else { 0 };
        let operands = [self.elems(inputs), inputs * outputs, self.elems(outputs)];
        self.ledger.operate(&operands, packed * size_of::<f32>());
    }

    /// A sum over the tokens, into a weight's gradient.
    fn product_for_weight(&mut self, inputs: usize, outputs: usize) {
        let packed = self.dims.tokens().min(PACKED_TERMS) * outputs;
        self.ledger.operate(&[self.elems(inputs), self.elems(outputs)], packed * size_of::<f32>());
    }

    /// An activation or its gradient.
    pub(super) fn take(&mut self, elems: usize) -> Buffer {
        self.ledger.take(Activations, Element::Stored, elems)
    }

    /// Statistics of tokens.
    pub(super) fn take_f32(&mut self, elems: usize) -> Buffer {
        self.ledger.take(Activations, Element::F32, elems)
    }

    /// Elements of a tensor with `width` numbers for each token.
    pub(super) fn elems(&self, width: usize) -> usize {
        self.dims.tokens() * width
    }

    pub(super) fn compute(&mut self, piece: Piece, pass: Pass, flops: f64) {
        self.ledger.push(Event::Compute(Work { piece, pass, flops }));
    }

    /// Forward, of the projections to q, k, v and from the attention's output.
    fn projection_flops(&self) -> f64 {
        let Dims { hidden, num_heads, num_kv_heads, head_dim, .. } = *self.dims;
        4.0 * self.elems(hidden) as f64 * ((num_heads + num_kv_heads) * head_dim) as f64
    }

    /// Forward, of gate, up and down.
    fn mlp_flops(&self) -> f64 {
        6.0 * self.elems(self.dims.hidden) as f64 * self.dims.intermediate as f64
    }
}
