//! The backward pass of linear attention.

use super::gated_norm::OutputAndGate;
use super::{LinearAttention, LinearAttentionSaved};
use crate::nn::projection::backward_project;
use crate::nn::{BackwardPass, BranchGradients, BranchInput, HeadTransfer, LayerError, token_rows};
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
        let LinearAttentionSaved { heads, gating, latents } = saved;
        let OutputAndGate { out: dout, z: dz } = self.backward_output(gating, dy, pass)?;
        let dmixed = match self.extended_tokens(forward)? {
            Some(extended) => self.backward_passed(heads, dout, &extended, pass)?,
            None => {
                let dout = self.exchange_output(dout, HeadTransfer::OutputGradient, forward)?;
                let dmixed = self.backward_heads(heads, &dout, pass)?;
                forward.recycle([dout]);
                self.exchange_mixed(dmixed, HeadTransfer::InputGradients, forward)?
            }
        };
        let doutputs = self.mixed.iter().zip(Vec::from(dmixed)).chain([(&self.z, dz)]).collect();
        backward_project(input, doutputs, latents, dx, pass)
    }

    /// Backward of output projection, gate and norm. Recycles what these had.
    fn backward_output(
        &self,
        gating: OutputAndGate,
        dy: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<OutputAndGate, LayerError> {
        let (forward, ws) = (&pass.forward, pass.forward.workspace());
        let (gradients, head_dim) = (gating.alloc_like(ws)?, self.shape.value_head_dim);
        for tile in forward.ctx.token_tiles() {
            let (dy, rows) = (token_rows(dy, &tile)?, gating.rows(&tile)?);
            let gated = self.norm.forward(&rows, head_dim, forward)?;
            let dgated = ws.alloc(gated.rows.dims())?;
            self.out.backward_weight(&dy, &gated.rows, pass)?;
            self.out.backward_input(&dy, &dgated, false, forward)?;
            self.norm.backward(dgated, gated, &rows, &gradients.rows(&tile)?, head_dim, pass)?;
        }
        gating.recycle(forward);
        Ok(gradients)
    }
}
