//! The forward pass of linear attention.

use super::LinearAttention;
use super::gated_norm::OutputAndGate;
use super::mixed::Mixed;
use super::saved::LinearAttentionSaved;
use crate::nn::projection;
use crate::nn::{BranchInput, ForwardPass, HeadTransfer, LayerError, token_dims, token_rows};
use candle_core::Tensor;

/// The projections of a rank's tokens.
struct Projected {
    mixed: Mixed<Tensor>,
    /// For the gate of the output.
    z: Tensor,
    latents: Vec<Tensor>,
}

impl LinearAttention {
    /// Adds the output to the tensor that the branch opens. Returns the state for the backward pass, if `keep`.
    ///
    /// # Shapes
    /// Result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A refused operation, or failed communication.
    pub fn forward(
        &self,
        input: BranchInput<'_>,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<LinearAttentionSaved>), LayerError> {
        let y = input.branch.open(input.x, pass)?;
        let Projected { mixed, z, latents } = self.project(input, pass)?;
        let (out, heads) = match self.extended_tokens(pass)? {
            Some(extended) => self.forward_passed(mixed, &extended, keep, pass)?,
            None => {
                let mixed = self.exchange_mixed(mixed, HeadTransfer::Inputs, pass)?;
                let (out, heads) = self.forward_heads(mixed, keep, pass)?;
                (self.exchange_output(out, HeadTransfer::Output, pass)?, heads)
            }
        };
        let gating = OutputAndGate { out, z };
        for tile in pass.ctx.token_tiles() {
            let gated = self.norm.forward(&gating.rows(&tile)?, self.shape.value_head_dim, pass)?;
            self.out.forward(&gated.rows, &token_rows(&y, &tile)?, true, pass)?;
            gated.recycle(pass);
        }
        let saved = match heads {
            Some(heads) => Some(LinearAttentionSaved { heads, gating, latents }),
            None => {
                gating.recycle(pass);
                pass.recycle(latents);
                None
            }
        };
        Ok((y, saved))
    }

    /// All projections of this rank's tokens.
    fn project(&self, input: BranchInput<'_>, pass: &ForwardPass<'_>) -> Result<Projected, LayerError> {
        let (ws, shape) = (pass.workspace(), &self.shape);
        let (batch, tokens) = token_dims(input.x);
        let keys = || ws.alloc((batch, tokens, shape.num_key_heads, shape.key_head_dim));
        let values = |dim| ws.alloc((batch, tokens, shape.num_value_heads, dim));
        let qkv = [keys()?, keys()?, values(shape.value_head_dim)?];
        let b = self.mixed.b.as_ref().map(|_| values(1)).transpose()?;
        let mixed = Mixed { qkv, b, a: values(shape.decays_per_head())? };
        let z = values(shape.value_head_dim)?;
        let outputs: Vec<_> = self.mixed.iter().zip(mixed.iter()).chain([(&self.z, &z)]).collect();
        let latents = projection::project(input, &outputs, pass)?;
        Ok(Projected { mixed, z, latents })
    }
}
