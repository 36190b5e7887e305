//! The backward pass of linear attention.

use super::{LinearAttention, LinearAttentionSaved};
use crate::nn::projection::backward_project;
use crate::nn::{BackwardPass, BranchGradients, BranchInput, Gathered, LayerError, token_rows};
use candle_core::Tensor;

impl LinearAttention {
    /// Backward of [`forward`](Self::forward): also adds to the gradients of the parameters.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(
        &self,
        input: BranchInput<'_>,
        saved: LinearAttentionSaved,
        BranchGradients { dy, dx }: BranchGradients<'_>,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let forward = &pass.forward;
        let LinearAttentionSaved { heads, out, z, latents } = saved;
        let (dout, dz) = self.backward_output(out, z, dy, pass)?;
        let dmixed = match self.extended_tokens(forward)? {
            Some(extended) => self.backward_passed(heads, dout, &extended, pass)?,
            None => {
                let dout = self.exchange_output(dout, (Gathered::Tokens, true), forward)?;
                let dmixed = self.backward_heads(heads, &dout, pass)?;
                forward.recycle([dout]);
                self.exchange_mixed(dmixed, (Gathered::Heads, true), forward)?
            }
        };
        let doutputs = self.mixed.iter().zip(Vec::from(dmixed)).chain([(&self.z, dz)]).collect();
        backward_project(input, doutputs, latents, dx, pass)
    }

    /// Backward of output projection, gate and norm. Returns the gradients of `out` and `z`, which are recycled.
    fn backward_output(
        &self,
        out: Tensor,
        z: Tensor,
        dy: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(Tensor, Tensor), LayerError> {
        let (forward, ws) = (&pass.forward, pass.forward.workspace());
        let (dout, dz) = (ws.alloc(out.dims())?, ws.alloc(z.dims())?);
        for tile in forward.ctx.token_tiles() {
            let dy = token_rows(dy, &tile)?;
            let gated = self.gated(&out, &z, &tile, forward)?;
            let dgated = ws.alloc(gated.rows.dims())?;
            self.out.backward_weight(&dy, &gated.rows, pass)?;
            self.out.backward_input(&dy, &dgated, false, forward)?;
            let rows = [&out, &z, &dout, &dz].map(|tensor| token_rows(tensor, &tile));
            let [out, z, dout, dz] = rows;
            let head_dim = self.shape.value_head_dim;
            self.norm.backward((dgated, gated), [&out?, &z?], [&dout?, &dz?], head_dim, pass)?;
        }
        forward.recycle([out, z]);
        Ok((dout, dz))
    }
}
