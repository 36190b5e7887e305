//! The backward pass of latent attention.

use super::forward::Projected;
use super::{LatentAttention, LatentAttentionSaved};
use crate::nn::attention::{ChunkState, delta, release_output};
use crate::nn::projection;
use crate::nn::{AttentionSaved, BackwardPass, BranchGradients, BranchInput, LayerError};
use candle_core::Tensor;
use ulysses_kernels::attention::{QkvGradients, Upstream};
use ulysses_kernels::rope::Direction;

impl LatentAttention {
    /// Backward of [`forward`](Self::forward): also adds to the gradients of the parameters. What is not saved is recomputed.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(
        &self,
        input: BranchInput<'_>,
        saved: LatentAttentionSaved,
        BranchGradients { dy, dx }: BranchGradients<'_>,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let (gradients, latents) = self.backward_attention(input, saved, dy, pass)?;
        self.backward_projections(input, gradients, latents, dx, pass)
    }

    /// The gradients of queries, keys and values, with the latents. Adds to the gradient of the output projection.
    fn backward_attention(
        &self,
        input: BranchInput<'_>,
        saved: LatentAttentionSaved,
        dy: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(QkvGradients, Vec<Tensor>), LayerError> {
        let forward = &pass.forward;
        let (ws, layout, attention) = (forward.workspace(), self.layout(forward)?, forward.ctx.attention());
        let LatentAttentionSaved { attention: saved, latents } = saved;
        let dout = ws.alloc(saved.out().dims())?;
        self.o.backward_weight(dy, &saved.out().flatten_from(2)?, pass)?;
        self.o.backward_input(dy, &dout.flatten_from(2)?, false, forward)?;
        let result = match (saved, latents) {
            (AttentionSaved { state: ChunkState::Whole { inner, out, .. }, .. }, Some(latents)) => {
                release_output(out, &inner, forward);
                (attention.backward(inner, &dout, &layout, ws)?, latents)
            }
            (saved, _) => {
                let [out, lse] = saved.into_checkpoint(forward);
                let delta = delta(out, &dout, forward)?;
                let Projected { q, k, v, latents } = self.project(input, forward)?;
                let upstream = Upstream { dout: &dout, lse: &lse, delta: &delta };
                let gradients = attention.backward_recomputed(q, k, v, &upstream, &layout, ws)?;
                forward.recycle([lse, delta]);
                (gradients, latents)
            }
        };
        ws.recycle(dout);
        Ok(result)
    }

    /// Adds to the gradients of all other parameters and of the residual stream, `dx`.
    fn backward_projections(
        &self,
        input: BranchInput<'_>,
        QkvGradients { dq, dk, dv }: QkvGradients,
        latents: Vec<Tensor>,
        dx: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let forward = &pass.forward;
        let [djoint, dk_rope] = self.join([dk, dv], forward)?;
        self.rotate(&dk_rope, Direction::Backward, forward)?;
        self.rotate_queries(&dq, Direction::Backward, forward)?;
        let doutputs = vec![(&self.q, dq), (&self.kv, djoint), (&self.k_rope, dk_rope)];
        projection::backward_project(input, doutputs, latents, dx, pass)
    }
}
