//! Saved state of latent attention.

use crate::nn::{AttentionSaved, ForwardPass};
use candle_core::Tensor;
use ulysses_kernels::tensor;

/// State of a forward pass for its backward pass.
pub struct LatentAttentionSaved {
    pub(super) attention: AttentionSaved,
    /// Latents before their norms, `[batch, seq_local, rank]`: of queries, if they have one, and of keys and values. `None` in a checkpoint,
    /// from which they are recomputed.
    pub(super) latents: Option<Vec<Tensor>>,
}

impl LatentAttentionSaved {
    /// The inverse of [`into_checkpoint`](Self::into_checkpoint).
    pub fn from_checkpoint(tensors: [Tensor; 2]) -> Self {
        Self { attention: AttentionSaved::from_checkpoint(tensors), latents: None }
    }

    /// The tensors of a checkpoint: attention output and lse. Recycles the others.
    pub fn into_checkpoint(self, pass: &ForwardPass<'_>) -> [Tensor; 2] {
        pass.recycle(self.latents.into_iter().flatten());
        self.attention.into_checkpoint(pass)
    }

    /// Bytes of the tensors.
    pub fn bytes(&self) -> usize {
        self.attention.bytes() + self.latents.iter().flatten().map(tensor::bytes).sum::<usize>()
    }
}
