//! The MLP half of the decoder block, in tiles of tokens.

use super::layer::DecoderLayer;
use super::weights::{Weights, add_weight_gradient};
use crate::model::{LayerContext, ModelError};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::{linear, rms_norm, strided_copy, swiglu};

/// Outputs of the gate and up projections, for all tokens.
pub(super) struct GateUp {
    pub(super) gate: Tensor,
    pub(super) up: Tensor,
}

impl DecoderLayer {
    /// Computes `mid + down(silu(gate(n)) · up(n))` with `n = norm(mid)`. With `keep` and without tiles, also
    /// returns the projections.
    pub(super) fn forward_mlp(
        &self,
        weights: &Weights<&Tensor>,
        mid: &Tensor,
        keep: bool,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Option<GateUp>), ModelError> {
        let ws = ctx.workspace();
        let keep = keep && ctx.tiling().tile_tokens.is_none();
        let y = ws.alloc(mid.dims())?;
        strided_copy::copy(mid, &y)?;
        let mut saved = None;
        for tile in ctx.token_tiles() {
            let GateUp { gate, up } = self.gate_up(weights, mid, &tile, ctx)?;
            let product = ws.alloc(gate.dims())?;
            swiglu::forward(&gate, &up, &product)?;
            linear::forward(&product, weights.down, &token_rows(&y, &tile)?, true)?;
            ws.recycle(product);
            if keep {
                saved = Some(GateUp { gate, up });
            } else {
                [gate, up].into_iter().for_each(|tensor| ws.recycle(tensor));
            }
        }
        Ok((y, saved))
    }

    /// Backward of the MLP half. `dy` becomes the gradient of its input `mid`. What the forward pass did not
    /// save is recomputed, tile by tile.
    pub(super) fn backward_mlp(
        &self,
        weights: &Weights<&Tensor>,
        grads: &Weights<Option<&Tensor>>,
        (mid, mut saved): (Tensor, Option<GateUp>),
        dy: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(), ModelError> {
        for tile in ctx.token_tiles() {
            let projections = match saved.take() {
                Some(saved) => saved,
                None => self.gate_up(weights, &mid, &tile, ctx)?,
            };
            self.backward_mlp_tile(
                weights,
                grads,
                (&token_rows(&mid, &tile)?, projections),
                &token_rows(dy, &tile)?,
                ctx,
            )?;
        }
        ctx.workspace().recycle(mid);
        Ok(())
    }

    /// [`backward_mlp`](Self::backward_mlp) of one tile.
    fn backward_mlp_tile(
        &self,
        weights: &Weights<&Tensor>,
        grads: &Weights<Option<&Tensor>>,
        (mid, GateUp { gate, up }): (&Tensor, GateUp),
        dy: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(), ModelError> {
        let ws = ctx.workspace();
        let product = ws.alloc(gate.dims())?;
        swiglu::forward(&gate, &up, &product)?;
        add_weight_gradient(dy, &product, grads.down)?;
        let dproduct = product;
        linear::backward_input(dy, weights.down, &dproduct, false)?;
        let (dgate, dup) = (ws.alloc(gate.dims())?, ws.alloc(gate.dims())?);
        swiglu::backward(&dproduct, &gate, &up, &dgate, &dup)?;
        [dproduct, gate, up].into_iter().for_each(|tensor| ws.recycle(tensor));

        let rstd = ws.alloc_f32(mid.dims()[0])?;
        let normed = self.normalize(mid, weights.post_attention_norm, &rstd, ctx)?;
        add_weight_gradient(&dgate, &normed, grads.gate)?;
        add_weight_gradient(&dup, &normed, grads.up)?;
        let dnormed = normed;
        linear::backward_input(&dgate, weights.gate, &dnormed, false)?;
        linear::backward_input(&dup, weights.up, &dnormed, true)?;
        let (weight, dweight) = (weights.post_attention_norm, grads.post_attention_norm);
        rms_norm::backward(&dnormed, mid, weight, &rstd, dy, true, dweight)?;
        [dgate, dup, dnormed, rstd].into_iter().for_each(|tensor| ws.recycle(tensor));
        Ok(())
    }

    /// Gate and up projections of a tile of tokens, `[tile, intermediate]`.
    fn gate_up(
        &self,
        weights: &Weights<&Tensor>,
        mid: &Tensor,
        tile: &Range<usize>,
        ctx: &LayerContext,
    ) -> Result<GateUp, ModelError> {
        let ws = ctx.workspace();
        let rstd = ws.alloc_f32(tile.len())?;
        let normed = self.normalize(&token_rows(mid, tile)?, weights.post_attention_norm, &rstd, ctx)?;
        let dims = (tile.len(), weights.gate.dims()[0]);
        let (gate, up) = (ws.alloc(dims)?, ws.alloc(dims)?);
        linear::forward(&normed, weights.gate, &gate, false)?;
        linear::forward(&normed, weights.up, &up, false)?;
        [normed, rstd].into_iter().for_each(|tensor| ws.recycle(tensor));
        Ok(GateUp { gate, up })
    }
}

/// A tile of tokens of `[batch, seq_local, …]` or `[batch, seq_local]`, as a matrix with one row per token.
/// Shares the storage.
pub(super) fn token_rows(x: &Tensor, tile: &Range<usize>) -> Result<Tensor, ModelError> {
    let tokens = x.dims()[0] * x.dims()[1];
    let width = x.elem_count() / tokens.max(1);
    Ok(x.reshape((tokens, width))?.narrow(0, tile.start, tile.len())?)
}
