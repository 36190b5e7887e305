//! The forward pass of latent attention.

use super::{LatentAttention, LatentAttentionSaved};
use crate::nn::attention::ReturningChunk;
use crate::nn::projection;
use crate::nn::{BranchInput, ForwardPass, LayerError, Saves, token_dims};
use candle_core::Tensor;
use ulysses_kernels::rope::Direction;

/// Queries, keys and values of all heads, with the latents that they come from.
pub(super) struct Projected {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) latents: Vec<Tensor>,
}

impl LatentAttention {
    /// Adds the attention's output to the tensor that the branch opens. Also returns the state: all of it, or that of a checkpoint.
    ///
    /// # Shapes
    /// Result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// More than one head chunk, a refused operation, or failed communication.
    pub fn forward(
        &self,
        input: BranchInput<'_>,
        saves: Saves,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, LatentAttentionSaved), LayerError> {
        self.shape.head_chunks(pass)?;
        let y = input.branch.open(input.x, pass)?;
        let Projected { q, k, v, latents } = self.project(input, pass)?;
        let attend = pass.ctx.attention().start_forward(q, k, v, &self.layout(pass)?, pass.workspace())?;
        let (inner, out) = attend(())?;
        let mut returning = ReturningChunk::new(inner, [None, None, None], None, out);
        let mut latents = Some(latents);
        if saves == Saves::Checkpoint {
            returning.recycle_qkv(pass);
            pass.recycle(latents.take().into_iter().flatten());
        }
        let saved = LatentAttentionSaved { attention: returning.finish(pass)?, latents };
        self.add_output(&saved, &y, pass)?;
        Ok((y, saved))
    }

    /// The result of [`forward`](Self::forward), from the saved output.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_from_output(
        &self,
        input: BranchInput<'_>,
        saved: &LatentAttentionSaved,
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let y = input.branch.open(input.x, pass)?;
        self.add_output(saved, &y, pass)?;
        Ok(y)
    }

    fn add_output(
        &self,
        saved: &LatentAttentionSaved,
        y: &Tensor,
        pass: &ForwardPass<'_>,
    ) -> Result<(), LayerError> {
        self.o.forward(&saved.attention.out().flatten_from(2)?, y, true, pass)
    }

    /// All projections of this rank's tokens, rotated.
    pub(super) fn project(
        &self,
        input: BranchInput<'_>,
        pass: &ForwardPass<'_>,
    ) -> Result<Projected, LayerError> {
        let (ws, (batch, tokens)) = (pass.workspace(), token_dims(input.x));
        let heads = |size: usize| ws.alloc((batch, tokens, self.shape.num_heads, size));
        let q = heads(self.shape.head_dim)?;
        let joint = heads(self.k_nope_dim() + self.latent.value_head_dim)?;
        let k_rope = ws.alloc((batch, tokens, 1, self.latent.rope_head_dim))?;
        let outputs = [(&self.q, &q), (&self.kv, &joint), (&self.k_rope, &k_rope)];
        let latents = projection::project(input, &outputs, pass)?;
        self.rotate_queries(&q, Direction::Forward, pass)?;
        self.rotate(&k_rope, Direction::Forward, pass)?;
        let [k, v] = self.split(joint, k_rope, pass)?;
        Ok(Projected { q, k, v, latents })
    }
}
