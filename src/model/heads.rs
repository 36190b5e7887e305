//! Projections to heads, with a bias or a norm where a family has them; forward and backward.

use super::decoder_weights::{HeadWeights, add_weight_gradient};
use super::{LayerContext, ModelError};
use crate::ops::{linear, reduce, rms_norm};
use candle_core::Tensor;

/// What the backward pass of a norm over heads needs.
pub(super) struct SavedHeadNorm {
    /// The heads before the norm.
    heads: Tensor,
    rstd: Tensor,
}

impl SavedHeadNorm {
    pub(super) fn bytes(&self) -> usize {
        crate::tensor::bytes(&self.heads) + crate::tensor::bytes(&self.rstd)
    }
}

/// `norm(x · weightᵀ + bias)`, as far as there are a bias and a norm.
///
/// # Shapes
/// `x`: `[batch, seq_local, hidden]`; result: `[batch, seq_local, heads, head_dim]`.
pub(super) fn forward(
    x: &Tensor,
    weights: HeadWeights<&Tensor>,
    head_dim: usize,
    eps: f64,
    ctx: &LayerContext,
) -> Result<(Tensor, Option<SavedHeadNorm>), ModelError> {
    let ws = ctx.workspace();
    let heads = weights.weight.dims()[0] / head_dim;
    let tokens = (ctx.batch(), ctx.seq_len_local());
    let dims = (tokens.0, tokens.1, heads, head_dim);
    let y = ws.take(dims)?;
    let rows = y.flatten_from(2)?;
    if let Some(bias) = weights.bias {
        // The product is added to the bias, not the bias to the product: 16-bit elements are
        // rounded once.
        let ones = ones(ctx)?;
        linear::forward(&ones, &as_column(bias)?, &rows, false)?;
        ws.give(ones);
    }
    linear::forward(x, weights.weight, &rows, weights.bias.is_some())?;
    let Some(norm) = weights.norm else { return Ok((y, None)) };
    let normed = ws.take(dims)?;
    let rstd = ws.take_f32((tokens.0, tokens.1, heads))?;
    rms_norm::forward(&y, norm, eps, &normed, &rstd)?;
    Ok((normed, Some(SavedHeadNorm { heads: y, rstd })))
}

/// Adds to the gradients of the weights, as far as they are not frozen, and returns that of the projection's result, from which
/// [`backward_input`] makes that of `x`. `dy` is used up.
///
/// # Shapes
/// `dy`: `[batch, seq_local, heads, head_dim]`; result: `[batch, seq_local, heads · head_dim]`.
pub(super) fn backward_weights(
    dy: Tensor,
    x: &Tensor,
    weights: HeadWeights<&Tensor>,
    grads: HeadWeights<Option<&Tensor>>,
    saved: Option<SavedHeadNorm>,
    ctx: &LayerContext,
) -> Result<Tensor, ModelError> {
    let ws = ctx.workspace();
    let dy = match (weights.norm, saved) {
        (Some(norm), Some(SavedHeadNorm { heads, rstd })) => {
            let dheads = ws.take(dy.dims())?;
            rms_norm::backward(&dy, &heads, norm, &rstd, &dheads, false, grads.norm.flatten())?;
            [dy, heads, rstd].into_iter().for_each(|tensor| ws.give(tensor));
            dheads
        }
        _ => dy,
    };
    let rows = dy.flatten_from(2)?;
    if let Some(dbias) = grads.bias.flatten() {
        // Σ dy over the tokens, as a product with ones.
        let ones = ones(ctx)?;
        linear::backward_weight(&rows, &ones, &as_column(dbias)?)?;
        ws.give(ones);
    }
    add_weight_gradient(&rows, x, grads.weight)?;
    Ok(dy)
}

/// Gradient of `x`: `dx = dy · weight`, added to `dx` with `accumulate`. `dy` is used up.
pub(super) fn backward_input(
    dy: Tensor,
    weights: HeadWeights<&Tensor>,
    dx: &Tensor,
    accumulate: bool,
    ctx: &LayerContext,
) -> Result<(), ModelError> {
    linear::backward_input(&dy.flatten_from(2)?, weights.weight, dx, accumulate)?;
    ctx.workspace().give(dy);
    Ok(())
}

/// A one for every token, `[batch, seq_local, 1]`: with it a bias is a linear layer of one input,
/// and needs no op of its own on any device.
fn ones(ctx: &LayerContext) -> Result<Tensor, ModelError> {
    let ones = ctx.workspace().take((ctx.batch(), ctx.seq_len_local(), 1))?;
    reduce::fill(&ones, 1.0)?;
    Ok(ones)
}

/// `[n]` → `[n, 1]`, the same storage.
fn as_column(bias: &Tensor) -> Result<Tensor, ModelError> {
    Ok(bias.reshape((bias.elem_count(), 1))?)
}
