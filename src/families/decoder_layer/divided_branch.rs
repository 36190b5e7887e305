//! A branch around a module that the ranks of tp divide.
//!
//! Norms and residual stream have some tokens per rank. Around a module, tokens are gathered, and its outputs, which are
//! partial sums, summed and scattered: the same bytes as an all-reduce of whole activations (arXiv 2205.05198, section 4.2.2).

use crate::nn::{BackwardPass, Branch, ForwardPass, LayerError, recycle_unless};
use candle_core::Tensor;

/// The output of a branch's module, summed, for this rank's tokens.
pub(super) fn run<T>(
    branch: &Branch,
    x: &Tensor,
    module: impl FnOnce(&Tensor) -> Result<(Tensor, T), LayerError>,
    pass: &ForwardPass<'_>,
) -> Result<(Tensor, T), LayerError> {
    let exchange = pass.ctx.token_exchange(pass.layer)?;
    let input = gather_input(branch, x, pass)?;
    let (partial, saved) = module(&input)?;
    let output = exchange.reduce_scatter(&partial)?;
    pass.recycle([input, partial]);
    Ok((output, saved))
}

/// Backward of [`run`]: adds to `dx`. `module` turns the gradient of its output into that of its input.
pub(super) fn run_backward(
    branch: &Branch,
    x: &Tensor,
    (doutput, dx): (&Tensor, &Tensor),
    module: impl FnOnce(&Tensor, &Tensor) -> Result<(), LayerError>,
    pass: &BackwardPass<'_>,
) -> Result<(), LayerError> {
    let forward = &pass.forward;
    let exchange = forward.ctx.token_exchange(forward.layer)?;
    let (input, normed, rstd) = gathered_input(branch, x, forward)?;
    let gradient = exchange.all_gather(doutput, forward.ctx.seq_len_local())?;
    module(&input, &gradient)?;
    let dnormed = exchange.reduce_scatter(&gradient)?;
    branch.backward_enter(&dnormed, x, &rstd, dx, pass)?;
    recycle_unless(normed, x, forward);
    forward.recycle([input, rstd, gradient, dnormed]);
    Ok(())
}

/// The input of a branch's module, for all tokens.
pub(super) fn gather_input(
    branch: &Branch,
    x: &Tensor,
    pass: &ForwardPass<'_>,
) -> Result<Tensor, LayerError> {
    let (input, normed, rstd) = gathered_input(branch, x, pass)?;
    recycle_unless(normed, x, pass);
    pass.recycle([rstd]);
    Ok(input)
}

/// The input of a branch's module for all tokens, and for this rank's, with their reciprocal root mean squares.
pub(super) fn gathered_input(
    branch: &Branch,
    x: &Tensor,
    pass: &ForwardPass<'_>,
) -> Result<(Tensor, Tensor, Tensor), LayerError> {
    let rstd = pass.workspace().alloc_f32(&x.dims()[..2])?;
    let normed = branch.enter(x, &rstd, pass)?;
    let input = pass.ctx.token_exchange(pass.layer)?.all_gather(&normed, pass.ctx.seq_len_local())?;
    Ok((input, normed, rstd))
}
