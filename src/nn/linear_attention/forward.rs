//! The forward pass of linear attention.

use super::LinearAttention;
use super::gated_norm::Gated;
use super::mixed::Mixed;
use super::saved::LinearAttentionSaved;
use crate::nn::projection;
use crate::nn::{BranchInput, ForwardPass, Gathered, LayerError, token_dims, token_rows};
use candle_core::Tensor;
use std::ops::Range;

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
        let (mixed, z, latents) = self.project(input, pass)?;
        let (out, heads) = match self.extended_tokens(pass)? {
            Some(extended) => self.forward_passed(mixed, &extended, keep, pass)?,
            None => {
                let mixed = self.exchange_mixed(mixed, (Gathered::Tokens, false), pass)?;
                let (out, heads) = self.forward_heads(mixed, keep, pass)?;
                (self.exchange_output(out, (Gathered::Heads, false), pass)?, heads)
            }
        };
        for tile in pass.ctx.token_tiles() {
            let gated = self.gated(&out, &z, &tile, pass)?;
            self.out.forward(&gated.rows, &token_rows(&y, &tile)?, true, pass)?;
            gated.recycle(pass);
        }
        let saved = match heads {
            Some(heads) => Some(LinearAttentionSaved { heads, out, z, latents }),
            None => {
                pass.recycle([out, z].into_iter().chain(latents));
                None
            }
        };
        Ok((y, saved))
    }

    /// All projections of this rank's tokens: the tensors to exchange, z, and the latents.
    fn project(
        &self,
        input: BranchInput<'_>,
        pass: &ForwardPass<'_>,
    ) -> Result<(Mixed<Tensor>, Tensor, Vec<Tensor>), LayerError> {
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
        Ok((mixed, z, latents))
    }

    /// The gated output of a tile of tokens.
    pub(super) fn gated(
        &self,
        out: &Tensor,
        z: &Tensor,
        tile: &Range<usize>,
        pass: &ForwardPass<'_>,
    ) -> Result<Gated, LayerError> {
        let rows = [&token_rows(out, tile)?, &token_rows(z, tile)?];
        self.norm.forward(rows, self.shape.value_head_dim, pass)
    }
}
