//! Saved state of self-attention.

use super::head_projection::SavedHeadNorm;
use crate::nn::{ForwardPass, LayerError};
use candle_core::Tensor;
use ulysses_kernels::attention::{self, Returning, SavedAttention};

/// Queries, keys, values and gate of one head chunk, with the state of the norms over heads.
pub(super) struct QkvHeads {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) norms: HeadNorms,
    pub(super) gate: Option<Tensor>,
}

/// State of the norms over the heads of q, k and v.
pub(in crate::nn) type HeadNorms = [Option<SavedHeadNorm>; 3];

/// The state that a forward pass saves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saves {
    /// All that the backward pass needs.
    Whole,
    /// The attention output and lse; q, k and v are recomputed.
    Checkpoint,
}

/// A head chunk that was attended, with its output on the way back.
pub(in crate::nn) struct ReturningChunk<'a> {
    /// q, k, v and the norms over heads; `None` if only a checkpoint is saved.
    qkv: Option<([Tensor; 3], HeadNorms)>,
    /// The output where it was computed; it is being sent.
    o: Tensor,
    lse: Tensor,
    gate: Option<Tensor>,
    out: Returning<'a, Tensor>,
}

impl<'a> ReturningChunk<'a> {
    pub(in crate::nn) fn new(
        inner: SavedAttention,
        norms: HeadNorms,
        gate: Option<Tensor>,
        out: Returning<'a, Tensor>,
    ) -> Self {
        let SavedAttention { q, k, v, o, lse } = inner;
        Self { qkv: Some(([q, k, v], norms)), o, lse, gate, out }
    }

    /// Recycles the tensors that a checkpoint does not contain and that are not being sent.
    pub(in crate::nn) fn recycle_qkv(&mut self, pass: &ForwardPass<'_>) {
        let Some((qkv, norms)) = self.qkv.take() else { return };
        pass.recycle(qkv);
        norms.into_iter().flatten().for_each(|norm| pass.recycle(norm.into_tensors()));
    }

    /// Waits for the output.
    pub(in crate::nn) fn finish(self, pass: &ForwardPass<'_>) -> Result<AttentionSaved, LayerError> {
        let Self { qkv, o, lse, gate, out } = self;
        let out = out.wait()?;
        let state = match qkv {
            Some(([q, k, v], norms)) => {
                ChunkState::Whole { inner: SavedAttention { q, k, v, o, lse }, out, norms }
            }
            None => {
                if o.id() != out.id() {
                    pass.recycle([o]);
                }
                ChunkState::Output { out, lse }
            }
        };
        Ok(AttentionSaved { state, gate })
    }
}

/// Saved state of one head chunk.
pub struct AttentionSaved {
    pub(in crate::nn) state: ChunkState,
    /// The gate of the output, if there is one. A checkpoint does not contain it.
    pub(super) gate: Option<Tensor>,
}

pub(in crate::nn) enum ChunkState {
    /// All that the backward pass needs.
    Whole {
        /// State of the attention.
        inner: SavedAttention,
        /// Attention output `[batch, seq_local, heads, head_dim]`.
        out: Tensor,
        /// State of the norms over heads.
        norms: HeadNorms,
    },
    /// Tensors of a checkpoint: q, k and v are recomputed.
    Output {
        /// As above.
        out: Tensor,
        /// As the attention saved it.
        lse: Tensor,
    },
}

impl AttentionSaved {
    /// The inverse of [`into_checkpoint`](Self::into_checkpoint).
    pub fn from_checkpoint([out, lse]: [Tensor; 2]) -> Self {
        Self { state: ChunkState::Output { out, lse }, gate: None }
    }

    /// The attention output.
    pub(in crate::nn) fn out(&self) -> &Tensor {
        match &self.state {
            ChunkState::Whole { out, .. } | ChunkState::Output { out, .. } => out,
        }
    }

    /// Bytes of the saved tensors.
    pub fn bytes(&self) -> usize {
        let bytes = ulysses_kernels::tensor::bytes;
        let state = match &self.state {
            ChunkState::Whole { inner, out, norms } => {
                let out = if shares_output(inner, out) { 0 } else { bytes(out) };
                let norms = norms.iter().flatten().map(SavedHeadNorm::bytes);
                inner.bytes() + out + norms.sum::<usize>()
            }
            ChunkState::Output { out, lse } => bytes(out) + bytes(lse),
        };
        state + self.gate.as_ref().map_or(0, bytes)
    }

    /// Recycles all tensors, for the next chunk.
    pub fn recycle(self, pass: &ForwardPass<'_>) {
        pass.recycle(self.into_checkpoint(pass));
    }

    /// The tensors of a checkpoint: attention output and lse. Recycles the others.
    pub fn into_checkpoint(self, pass: &ForwardPass<'_>) -> [Tensor; 2] {
        pass.recycle(self.gate);
        match self.state {
            ChunkState::Output { out, lse } => [out, lse],
            ChunkState::Whole { inner, out, norms } => {
                let is_shared = shares_output(&inner, &out);
                let SavedAttention { q, k, v, o, lse } = inner;
                let o = Some(o).filter(|_| !is_shared);
                pass.recycle([q, k, v].into_iter().chain(o));
                norms.into_iter().flatten().for_each(|norm| pass.recycle(norm.into_tensors()));
                [out, lse]
            }
        }
    }
}

/// Recycles an output, unless the attention state has the same tensor: the attention may free that one, so nobody else must hold it.
pub(in crate::nn) fn release_output(out: Tensor, inner: &SavedAttention, pass: &ForwardPass<'_>) {
    if !shares_output(inner, &out) {
        pass.recycle([out]);
    }
}

/// `delta` of a saved output, which is recycled, and its gradient.
pub(in crate::nn) fn delta(out: Tensor, dout: &Tensor, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
    let (batch, tokens, heads, _) = out.dims4()?;
    let delta = pass.workspace().alloc_f32((batch, heads, tokens))?;
    attention::delta(&out, dout, &delta)?;
    pass.recycle([out]);
    Ok(delta)
}

/// Returns whether the attention saved the same tensor that it returned, as it does without sequence parallelism.
fn shares_output(inner: &SavedAttention, out: &Tensor) -> bool {
    out.id() == inner.o.id()
}
