//! Biases, as linear layers with one input that is 1: they need no op of their own.

use crate::nn::LayerError;
use candle_core::{DType, Tensor};
use ulysses_kernels::{Workspace, elementwise, linear};

/// Writes a bias to every row of `y`, or adds it.
///
/// # Shapes
/// `bias`: `[n]`, `y`: `[…, n]`.
pub(crate) fn add_bias(
    bias: &Tensor,
    y: &Tensor,
    accumulate: bool,
    ws: &Workspace,
) -> Result<(), LayerError> {
    let ones = ones_for(y, bias, ws)?;
    linear::forward(&ones, &as_column(bias)?, y, accumulate)?;
    ws.recycle(ones);
    Ok(())
}

/// Adds `Σ dy` over the rows to the gradient of a bias.
///
/// # Shapes
/// `dy`: `[…, n]` of any element type, `dbias`: `[n]`.
pub(crate) fn add_bias_gradient(dy: &Tensor, dbias: &Tensor, ws: &Workspace) -> Result<(), LayerError> {
    let ones = ones_for(dy, dbias, ws)?;
    linear::backward_weight(dy, &ones, &as_column(dbias)?)?;
    ws.recycle(ones);
    Ok(())
}

/// A one per row.
fn ones_for(rows: &Tensor, bias: &Tensor, ws: &Workspace) -> Result<Tensor, LayerError> {
    let shape = (rows.elem_count() / bias.elem_count().max(1), 1);
    let ones = if rows.dtype() == DType::F32 { ws.alloc_f32(shape)? } else { ws.alloc(shape)? };
    elementwise::fill(&ones, 1.0)?;
    Ok(ones)
}

/// `[n]` → `[n, 1]`, sharing the storage.
fn as_column(bias: &Tensor) -> Result<Tensor, LayerError> {
    Ok(bias.reshape((bias.elem_count(), 1))?)
}
