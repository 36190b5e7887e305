//! The backward pass of linear attention.

use super::{EXCHANGED, LinearAttention, LinearAttentionSaved};
use crate::nn::{BackwardPass, Branch, Gathered, HeadKind, LayerError, token_rows};
use candle_core::Tensor;
use ulysses_kernels::glu::{self, Activation};

impl LinearAttention {
    /// Backward of [`forward`](Self::forward) for the gradient `dy` of the output: adds to the gradients of the parameters and
    /// of `x`. `dx` may be `dy`.
    ///
    /// # Shapes
    /// `x`, `dy`, `dx`: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(
        &self,
        branch: &Branch,
        x: &Tensor,
        saved: LinearAttentionSaved,
        (dy, dx): (&Tensor, &Tensor),
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let forward = &pass.forward;
        let LinearAttentionSaved { heads, out, z } = saved;
        let (dout, dz) = self.backward_output(out, z, dy, pass)?;
        let [dout] = self.exchange([dout], [HeadKind::Value], (Gathered::Tokens, true), forward)?;
        let dmixed = self.backward_heads(heads, &dout, pass)?;
        forward.recycle([dout]);
        let dmixed = self.exchange(dmixed, EXCHANGED, (Gathered::Heads, true), forward)?;
        let outputs: Vec<_> = self.mixed.iter().zip(&dmixed).chain([(&self.z, &dz)]).collect();
        branch.backward_project(x, &outputs, dx, pass)?;
        forward.recycle(dmixed);
        forward.recycle([dz]);
        Ok(())
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
            let (normed, rstd) = self.normalize(&out, &tile, forward)?;
            let z = self.head_rows(&z, &tile)?;
            let (gated, dgated) = (ws.alloc(normed.dims())?, ws.alloc(normed.dims())?);
            glu::forward(Activation::Silu, &z, &normed, &gated)?;
            let columns = (tile.len(), self.shape.value_dim());
            self.out.backward_weight(&dy, &gated.reshape(columns)?, pass)?;
            self.out.backward_input(&dy, &dgated.reshape(columns)?, false, forward)?;
            let (dz, dnormed) = (self.head_rows(&dz, &tile)?, gated);
            glu::backward(Activation::Silu, &dgated, &z, &normed, &dz, &dnormed)?;
            let (out, dout) = (self.head_rows(&out, &tile)?, self.head_rows(&dout, &tile)?);
            self.norm.backward(&dnormed, &out, &rstd, (&dout, false), pass)?;
            forward.recycle([normed, rstd, dgated, dnormed]);
        }
        forward.recycle([out, z]);
        Ok((dout, dz))
    }
}
