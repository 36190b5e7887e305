//! Saved state of latent attention.

use crate::nn::{AttentionSaved, ForwardPass};
use candle_core::Tensor;
use ulysses_kernels::tensor;

/// State of a forward pass for its backward pass.
pub struct LatentAttentionSaved {
    pub(super) attention: AttentionSaved,
    /// `None` in a checkpoint, from which they are recomputed.
    pub(super) latents: Option<Latents>,
}

/// Latents before their norms, `[batch, seq_local, rank]`.
pub(super) struct Latents {
    /// That of the queries, unless these are projected directly.
    pub(super) q: Option<Tensor>,
    /// That of keys and values.
    pub(super) kv: Tensor,
}

impl Latents {
    pub(super) fn recycle(self, pass: &ForwardPass<'_>) {
        pass.recycle(self.q.into_iter().chain([self.kv]));
    }
}

impl LatentAttentionSaved {
    /// The inverse of [`into_checkpoint`](Self::into_checkpoint).
    pub fn from_checkpoint(tensors: [Tensor; 2]) -> Self {
        Self { attention: AttentionSaved::from_checkpoint(tensors), latents: None }
    }

    /// The tensors of a checkpoint: attention output and lse. Recycles the others.
    pub fn into_checkpoint(self, pass: &ForwardPass<'_>) -> [Tensor; 2] {
        self.latents.into_iter().for_each(|latents| latents.recycle(pass));
        self.attention.into_checkpoint(pass)
    }

    /// Bytes of the tensors.
    pub fn bytes(&self) -> usize {
        let latents = self.latents.iter().flat_map(|latents| latents.q.iter().chain([&latents.kv]));
        self.attention.bytes() + latents.map(tensor::bytes).sum::<usize>()
    }
}
