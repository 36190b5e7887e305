//! A decoder layer: the counterpart of [`DecoderLayer`](crate::model::DecoderLayer), tensor by tensor.

use super::attention::SequenceParallel;
use super::dims::{Dims, Tile};
use super::event::{Event, Pass, Piece, Work};
use super::heads::SavedChunk;
use super::ledger::{Buffer, ElementType, Ledger};
use super::mlp::GateUp;
use crate::model::Weights;
use ulysses_kernels::linear::ProductMemory;
use ulysses_kernels::memory::Category::Activations;

/// Terms that a product adds up at a time, and so how long the pieces are that its operands are packed into.
const PACKED_TERMS: usize = 512;
/// Rows up to which a weight is packed at once (the gemm crate: twice eight panels of 48).
const MAX_PACKED_ROWS: usize = 768;

/// What a layer keeps for its backward pass, but for its input.
#[derive(Debug)]
pub(super) struct SavedLayer {
    attention: Vec<SavedChunk>,
    mid: Buffer,
    mlp: Option<GateUp>,
}

/// The layers' sizes and the services that they share, as in a forward or backward pass.
pub(super) struct LayerPass<'a> {
    pub(super) dims: &'a Dims,
    pub(super) attention: &'a mut SequenceParallel,
    pub(super) ledger: &'a mut Ledger,
    /// Arithmetic that has not been told.
    flops: f64,
}

impl<'a> LayerPass<'a> {
    pub(super) fn new(dims: &'a Dims, attention: &'a mut SequenceParallel, ledger: &'a mut Ledger) -> Self {
        Self { dims, attention, ledger, flops: 0.0 }
    }

    /// The layer's output, and what its backward needs.
    pub(super) fn forward(&mut self) -> (Buffer, SavedLayer) {
        let (mid, attention) = self.forward_attention(true, Pass::Forward);
        let (y, mlp) = self.forward_mlp(true);
        (y, SavedLayer { attention, mid, mlp })
    }

    /// The gradient of the output becomes that of the input. Which parameters are trained says which gradients
    /// there are.
    pub(super) fn backward(&mut self, saved: SavedLayer, trained: &Weights<bool>) {
        let SavedLayer { attention, mid, mlp } = saved;
        self.backward_mlp(mid, mlp, trained);
        self.backward_attention(attention, trained);
    }

    /// The layer's output, and what it can be computed from again.
    pub(super) fn forward_checkpointed(&mut self, x: Buffer) -> (Buffer, Vec<Buffer>) {
        let (mid, _) = self.forward_attention(false, Pass::Forward);
        let (y, _) = self.forward_mlp(false);
        if self.dims.chunks.len() > 1 {
            return (y, vec![x, mid]);
        }
        self.ledger.give(mid);
        (y, vec![x])
    }

    /// As [`backward`](Self::backward), from a checkpoint.
    pub(super) fn backward_checkpointed(&mut self, checkpoint: Vec<Buffer>, trained: &Weights<bool>) {
        let mut checkpoint = checkpoint.into_iter();
        let x = checkpoint.next();
        let (mid, attention) = match checkpoint.next() {
            Some(mid) => (mid, Vec::new()),
            None => self.forward_attention(true, Pass::Recompute),
        };
        self.backward_mlp(mid, None, trained);
        self.backward_attention(attention, trained);
        x.into_iter().for_each(|x| self.ledger.give(x));
    }

    /// Some tokens of the residual stream normalised; their statistics are the caller's.
    pub(super) fn normalise(&mut self, Tile { tokens, times }: Tile) -> Buffer {
        let (hidden, x) = (self.dims.hidden, tokens * self.dims.hidden);
        let y = self.take(x);
        self.ledger.sweep(&[x, hidden, x], 0, times);
        y
    }

    pub(super) fn backward_norm(&mut self, Tile { tokens, times }: Tile) {
        let (hidden, x) = (self.dims.hidden, tokens * self.dims.hidden);
        let scratch = self.attention.kernels.norm_backward_bytes(tokens, hidden);
        self.ledger.sweep(&[x, x, hidden, x], scratch, times);
    }

    /// A product of `inputs` numbers of every token with a weight.
    pub(super) fn product(&mut self, tile: Tile, inputs: usize, outputs: usize) {
        self.product_beside(tile, (inputs, outputs), 0);
    }

    /// The same with `bytes` more for as long as it takes.
    pub(super) fn product_beside(&mut self, tile: Tile, (inputs, outputs): (usize, usize), bytes: usize) {
        let sizes = [tile.tokens, inputs, outputs];
        match self.attention.kernels.product(sizes) {
            ProductMemory::Panels => {
                let packed = if outputs <= MAX_PACKED_ROWS { inputs.min(PACKED_TERMS) * outputs } else { 0 };
                self.ledger.scratch(packed * size_of::<f32>() + bytes);
            }
            kept => {
                self.ledger.keep(kept);
                self.ledger.scratch(bytes);
            }
        }
        self.count(tile, inputs, outputs);
    }

    /// A sum over the tokens, into a weight's gradient, if it has one.
    pub(super) fn product_for_weight(
        &mut self,
        tile: Tile,
        (inputs, outputs): (usize, usize),
        is_trained: bool,
    ) {
        if !is_trained {
            return;
        }
        let sizes = [tile.tokens, inputs, outputs];
        let memory = self.attention.kernels.weight_product(sizes);
        self.sum_over_tokens(memory, tile.tokens, outputs);
        self.count(tile, inputs, outputs);
    }

    /// What such a sum needs.
    pub(super) fn sum_over_tokens(&mut self, memory: ProductMemory, tokens: usize, outputs: usize) {
        match memory {
            ProductMemory::Panels => {
                self.ledger.scratch(tokens.min(PACKED_TERMS) * outputs * size_of::<f32>());
            }
            kept => self.ledger.keep(kept),
        }
    }

    /// A multiplication with an addition is two operations.
    pub(super) fn count(&mut self, tile: Tile, inputs: usize, outputs: usize) {
        self.flops += 2.0 * (tile.tokens * tile.times) as f64 * (inputs * outputs) as f64;
    }

    /// An activation or its gradient.
    pub(super) fn take(&mut self, elems: usize) -> Buffer {
        self.ledger.take(Activations, ElementType::Stored, elems)
    }

    /// Statistics of tokens.
    pub(super) fn take_f32(&mut self, elems: usize) -> Buffer {
        self.ledger.take(Activations, ElementType::F32, elems)
    }

    /// Elements of a tensor with `width` numbers for each token.
    pub(super) fn elems(&self, width: usize) -> usize {
        self.dims.tokens() * width
    }

    /// Tells the arithmetic since the last time.
    pub(super) fn compute(&mut self, piece: Piece, pass: Pass) {
        let flops = std::mem::take(&mut self.flops);
        if flops > 0.0 {
            self.ledger.push(Event::Compute(Work { piece, pass, flops }));
        }
    }
}
