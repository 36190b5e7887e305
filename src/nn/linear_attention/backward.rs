//! The backward pass of linear attention.

use super::{EXCHANGED, LinearAttention, LinearAttentionSaved};
use crate::nn::{
    BackwardPass, Branch, Gathered, HeadKind, LayerError, recycle_unless, token_dims, token_rows,
};
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

        let rstd = forward.workspace().alloc_f32(token_dims(x))?;
        let dnormed = forward.workspace().alloc(x.dims())?;
        for tile in forward.ctx.token_tiles() {
            let x = token_rows(x, &tile)?;
            let normed = branch.enter(&x, &token_rows(&rstd, &tile)?, forward)?;
            let dx = token_rows(&dnormed, &tile)?;
            let projections = self.mixed.iter().zip(&dmixed).chain([(&self.z, &dz)]);
            for (index, (linear, dy)) in projections.enumerate() {
                let dy = token_rows(dy, &tile)?;
                linear.backward_weight(&dy, &normed, pass)?;
                linear.backward_input(&dy, &dx, index > 0, forward)?;
            }
            recycle_unless(normed, &x, forward);
        }
        forward.recycle(dmixed);
        branch.backward_enter(&dnormed, x, &rstd, dx, pass)?;
        forward.recycle([dz, dnormed, rstd]);
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
