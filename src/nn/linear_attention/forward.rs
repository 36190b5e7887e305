//! The forward pass of linear attention.

use super::saved::LinearAttentionSaved;
use super::{EXCHANGED, LinearAttention, LinearAttentionConfig};
use crate::nn::{Branch, ForwardPass, Gathered, HeadKind, LayerError, token_dims, token_rows};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::glu::{self, Activation};

impl LinearAttention {
    /// Adds the output to the tensor that the branch opens. Returns the state for the backward pass, if `keep`.
    ///
    /// # Shapes
    /// `x`, result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A refused operation, or failed communication.
    pub fn forward(
        &self,
        branch: &Branch,
        x: &Tensor,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<LinearAttentionSaved>), LayerError> {
        let y = branch.open(x, pass)?;
        let (mixed, z) = self.project(branch, x, pass)?;
        let mixed = self.exchange(mixed, EXCHANGED, (Gathered::Tokens, false), pass)?;
        let (out, heads) = self.forward_heads(mixed, keep, pass)?;
        let [out] = self.exchange([out], [HeadKind::Value], (Gathered::Heads, false), pass)?;
        for tile in pass.ctx.token_tiles() {
            let (normed, rstd) = self.normalize(&out, &tile, pass)?;
            let gated = pass.workspace().alloc(normed.dims())?;
            glu::forward(Activation::Silu, &self.head_rows(&z, &tile)?, &normed, &gated)?;
            let rows = gated.reshape((tile.len(), self.shape.value_dim()))?;
            self.out.forward(&rows, &token_rows(&y, &tile)?, true, pass)?;
            pass.recycle([normed, rstd, gated]);
        }
        let saved = match heads {
            Some(heads) => Some(LinearAttentionSaved { heads, out, z }),
            None => {
                pass.recycle([out, z]);
                None
            }
        };
        Ok((y, saved))
    }

    /// All projections of this rank's tokens: the tensors to exchange, and z.
    fn project(
        &self,
        branch: &Branch,
        x: &Tensor,
        pass: &ForwardPass<'_>,
    ) -> Result<([Tensor; 5], Tensor), LayerError> {
        let (ws, shape) = (pass.workspace(), &self.shape);
        let (batch, tokens) = token_dims(x);
        let keys = || ws.alloc((batch, tokens, shape.num_key_heads, shape.key_head_dim));
        let values = |dim| ws.alloc((batch, tokens, shape.num_value_heads, dim));
        let mixed = [keys()?, keys()?, values(shape.value_head_dim)?, values(1)?, values(1)?];
        let z = values(shape.value_head_dim)?;
        let outputs: Vec<_> = self.mixed.iter().zip(&mixed).chain([(&self.z, &z)]).collect();
        branch.project(x, &outputs, pass)?;
        Ok((mixed, z))
    }

    /// The normalized heads of a tile of tokens, with their reciprocal root mean squares.
    pub(super) fn normalize(
        &self,
        out: &Tensor,
        tile: &Range<usize>,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Tensor), LayerError> {
        let out = self.head_rows(out, tile)?;
        let rstd = pass.workspace().alloc_f32(out.dims()[0])?;
        let normed = self.norm.forward(&out, &rstd, pass)?;
        Ok((normed, rstd))
    }

    /// The value heads of a tile of tokens, `[tile · heads, value_head_dim]`, sharing the storage.
    pub(super) fn head_rows(&self, x: &Tensor, tile: &Range<usize>) -> Result<Tensor, LayerError> {
        let LinearAttentionConfig { num_value_heads, value_head_dim, .. } = self.shape;
        Ok(token_rows(x, tile)?.reshape((tile.len() * num_value_heads, value_head_dim))?)
    }
}
