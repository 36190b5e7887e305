//! The q, k and v projections, with the family's bias or norm; forward and backward.
//!
//! Projections work on a tile of tokens, norms on all tokens.

use super::weights::{HeadRows, add_weight_gradient};
use crate::model::{LayerContext, ModelError};
use candle_core::Tensor;
use ulysses_kernels::{elementwise, linear, rms_norm};

/// State for the backward pass of a norm over heads.
pub(super) struct SavedHeadNorm {
    /// The heads before the norm.
    heads: Tensor,
    rstd: Tensor,
}

impl SavedHeadNorm {
    pub(super) fn bytes(&self) -> usize {
        ulysses_kernels::tensor::bytes(&self.heads) + ulysses_kernels::tensor::bytes(&self.rstd)
    }

    /// Recycles its tensors.
    pub(super) fn recycle(self, ctx: &LayerContext) {
        [self.heads, self.rstd].into_iter().for_each(|tensor| ctx.workspace().recycle(tensor));
    }
}

/// Allocates heads of all tokens, `[batch, seq_local, heads, head_dim]`, with unspecified content.
pub(super) fn alloc_heads(
    weights: &HeadRows<Tensor>,
    head_dim: usize,
    ctx: &LayerContext,
) -> Result<Tensor, ModelError> {
    let heads = weights.weight.dims()[0] / head_dim;
    Ok(ctx.workspace().alloc((ctx.batch(), ctx.seq_len_local(), heads, head_dim))?)
}

/// Computes `y = x · weightᵀ + bias`, with the bias if there is one.
///
/// # Shapes
/// `x`: `[tile, hidden]`, `y`: `[tile, heads · head_dim]`.
pub(super) fn project(
    x: &Tensor,
    weights: &HeadRows<Tensor>,
    y: &Tensor,
    ctx: &LayerContext,
) -> Result<(), ModelError> {
    if let Some(bias) = &weights.bias {
        // The product is added to the bias, not the bias to the product, so that 16-bit elements are rounded
        // once.
        let ones = ones(x.dims()[0], ctx)?;
        linear::forward(&ones, &as_column(bias)?, y, false)?;
        ctx.workspace().recycle(ones);
    }
    Ok(linear::forward(x, &weights.weight, y, weights.bias.is_some())?)
}

/// Normalizes the heads, if there is a norm.
///
/// # Shapes
/// `y`, result: `[batch, seq_local, heads, head_dim]`.
pub(super) fn normalize(
    y: Tensor,
    norm: Option<&Tensor>,
    eps: f64,
    ctx: &LayerContext,
) -> Result<(Tensor, Option<SavedHeadNorm>), ModelError> {
    let Some(norm) = norm else { return Ok((y, None)) };
    let (b, s, heads, _) = y.dims4()?;
    let normed = ctx.workspace().alloc(y.dims())?;
    let rstd = ctx.workspace().alloc_f32((b, s, heads))?;
    rms_norm::forward(&y, norm, eps, &normed, &rstd)?;
    Ok((normed, Some(SavedHeadNorm { heads: y, rstd })))
}

/// Backward of [`normalize`]: adds to the norm's gradient, unless it is frozen, and returns the input's
/// gradient. Consumes `dy`.
///
/// # Shapes
/// `dy`, result: `[batch, seq_local, heads, head_dim]`.
pub(super) fn backward_norm(
    dy: Tensor,
    norm: Option<&Tensor>,
    dnorm: Option<&Tensor>,
    saved: Option<SavedHeadNorm>,
    ctx: &LayerContext,
) -> Result<Tensor, ModelError> {
    let (Some(norm), Some(saved)) = (norm, saved) else { return Ok(dy) };
    let dheads = ctx.workspace().alloc(dy.dims())?;
    rms_norm::backward(&dy, &saved.heads, norm, &saved.rstd, &dheads, false, dnorm)?;
    ctx.workspace().recycle(dy);
    saved.recycle(ctx);
    Ok(dheads)
}

/// Backward of [`project`] for the weights: adds to their gradients, unless they are frozen.
///
/// # Shapes
/// `dy`: `[tile, heads · head_dim]`, `x`: `[tile, hidden]`.
pub(super) fn backward_weight(
    dy: &Tensor,
    x: &Tensor,
    grads: &HeadRows<Option<Tensor>>,
    ctx: &LayerContext,
) -> Result<(), ModelError> {
    if let Some(Some(dbias)) = &grads.bias {
        // Σ dy over the tokens, as a matmul with ones.
        let ones = ones(x.dims()[0], ctx)?;
        linear::backward_weight(dy, &ones, &as_column(dbias)?)?;
        ctx.workspace().recycle(ones);
    }
    add_weight_gradient(dy, x, grads.weight.as_ref())
}

/// A one per token, `[tile, 1]`. With it a bias is a linear layer with one input, and needs no op of its own.
fn ones(tokens: usize, ctx: &LayerContext) -> Result<Tensor, ModelError> {
    let ones = ctx.workspace().alloc((tokens, 1))?;
    elementwise::fill(&ones, 1.0)?;
    Ok(ones)
}

/// `[n]` → `[n, 1]`, sharing the storage.
fn as_column(bias: &Tensor) -> Result<Tensor, ModelError> {
    Ok(bias.reshape((bias.elem_count(), 1))?)
}
