//! The forward pass of latent attention.

use super::saved::Latents;
use super::{LatentAttention, LatentAttentionSaved, QueryProjection};
use crate::nn::attention::ReturningChunk;
use crate::nn::{Branch, ForwardPass, LayerError, Saves, token_dims};
use candle_core::Tensor;
use ulysses_kernels::rope::Direction;

/// Queries, keys and values of all heads, with the latents that they come from.
pub(super) struct Projected {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) latents: Latents,
}

impl LatentAttention {
    /// Adds the attention's output to the tensor that the branch opens. Also returns the state: all of it, or that of a checkpoint.
    ///
    /// # Shapes
    /// `x`, result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// More than one head chunk, a refused operation, or failed communication.
    pub fn forward(
        &self,
        branch: &Branch,
        x: &Tensor,
        saves: Saves,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, LatentAttentionSaved), LayerError> {
        self.check_chunks(pass)?;
        let y = branch.open(x, pass)?;
        let Projected { q, k, v, latents } = self.project(branch, x, pass)?;
        let attend = pass.ctx.attention().start_forward(q, k, v, &self.layout(pass)?, pass.workspace())?;
        let (inner, out) = attend(())?;
        let mut returning = ReturningChunk::new(inner, ([None, None, None], None), out);
        let mut latents = Some(latents);
        if saves == Saves::Checkpoint {
            returning.recycle_qkv(pass);
            latents.take().into_iter().for_each(|latents| latents.recycle(pass));
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
        branch: &Branch,
        x: &Tensor,
        saved: &LatentAttentionSaved,
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let y = branch.open(x, pass)?;
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
        branch: &Branch,
        x: &Tensor,
        pass: &ForwardPass<'_>,
    ) -> Result<Projected, LayerError> {
        let (ws, (batch, tokens)) = (pass.workspace(), token_dims(x));
        let heads = |size: usize| ws.alloc((batch, tokens, self.shape.num_heads, size));
        let latent = |rank: usize| ws.alloc((batch, tokens, rank));
        let first = match self.latent.q_rank {
            None => heads(self.shape.head_dim)?,
            Some(rank) => latent(rank)?,
        };
        let kv_latent = latent(self.latent.kv_rank)?;
        let k_rope = ws.alloc((batch, tokens, 1, self.latent.rope_head_dim))?;
        let outputs = [(self.q.first(), &first), (&self.kv.down, &kv_latent), (&self.k_rope, &k_rope)];
        branch.project(x, &outputs, pass)?;
        let (q, q_latent) = match &self.q {
            QueryProjection::Direct(_) => (first, None),
            QueryProjection::LowRank(low_rank) => {
                let q = heads(self.shape.head_dim)?;
                low_rank.forward(&first, &q, pass)?;
                (q, Some(first))
            }
        };
        self.rotate_queries(&q, Direction::Forward, pass)?;
        self.rotate(&k_rope, Direction::Forward, pass)?;
        let joint = heads(self.k_nope_dim() + self.latent.value_head_dim)?;
        self.kv.forward(&kv_latent, &joint, pass)?;
        let [k, v] = self.split(joint, k_rope, pass)?;
        Ok(Projected { q, k, v, latents: Latents { q: q_latent, kv: kv_latent } })
    }
}
