//! The call of a branch's module: a whole one joins the branch itself, one that the ranks of tp divide is called alone.
//!
//! Norms and residual stream then have some tokens per rank. Around a module, tokens are gathered, and its outputs, which are
//! partial sums, summed and scattered: the same bytes as an all-reduce of whole activations (arXiv 2205.05198, section 4.2.2).

use crate::nn::{
    BackwardPass, Branch, BranchGradients, BranchInput, ForwardPass, LayerError, recycle_unless,
};
use candle_core::Tensor;

/// The output of a branch's module, for this rank's tokens; summed if ranks divide the module.
pub(super) fn run<T>(
    input: BranchInput<'_>,
    module: impl FnOnce(BranchInput<'_>) -> Result<(Tensor, T), LayerError>,
    pass: &ForwardPass<'_>,
) -> Result<(Tensor, T), LayerError> {
    if !input.branch.has_residual_by_branch() {
        return module(input);
    }
    let exchange = pass.ctx.token_exchange(pass.layer)?;
    let input = gather_input(input, pass)?;
    let (partial, saved) = module(Branch::residual_by_caller().input(&input))?;
    let output = exchange.reduce_scatter(&partial)?;
    pass.recycle([input, partial]);
    Ok((output, saved))
}

/// Backward of [`run`].
pub(super) fn run_backward(
    input: BranchInput<'_>,
    gradients: BranchGradients<'_>,
    module: impl FnOnce(BranchInput<'_>, BranchGradients<'_>) -> Result<(), LayerError>,
    pass: &BackwardPass<'_>,
) -> Result<(), LayerError> {
    if !input.branch.has_residual_by_branch() {
        return module(input, gradients);
    }
    let forward = &pass.forward;
    let exchange = forward.ctx.token_exchange(forward.layer)?;
    let gathered = GatheredInput::new(input, forward)?;
    let gradient = exchange.all_gather(gradients.dy, forward.ctx.seq_len_local())?;
    // The module turns the gradient of its output into that of its input.
    let of_module = BranchGradients { dy: &gradient, dx: &gradient };
    module(Branch::residual_by_caller().input(&gathered.all), of_module)?;
    gathered.backward(input, &gradient, gradients.dx, pass)?;
    forward.recycle([gradient]);
    Ok(())
}

/// The input of a branch's module, for all tokens.
pub(super) fn gather_input(input: BranchInput<'_>, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
    let GatheredInput { all, own, rstd } = GatheredInput::new(input, pass)?;
    recycle_unless(own, input.x, pass);
    pass.recycle([rstd]);
    Ok(all)
}

/// The input of a branch's module, with what its gradient needs.
pub(super) struct GatheredInput {
    /// The input of all tokens.
    pub(super) all: Tensor,
    /// The input of this rank's tokens.
    own: Tensor,
    /// The reciprocal root mean squares of this rank's tokens.
    rstd: Tensor,
}

impl GatheredInput {
    pub(super) fn new(
        BranchInput { branch, x }: BranchInput<'_>,
        pass: &ForwardPass<'_>,
    ) -> Result<Self, LayerError> {
        let rstd = pass.workspace().alloc_f32(&x.dims()[..2])?;
        let own = branch.enter(x, &rstd, pass)?;
        let all = pass.ctx.token_exchange(pass.layer)?.all_gather(&own, pass.ctx.seq_len_local())?;
        Ok(Self { all, own, rstd })
    }

    /// Backward of [`new`](Self::new), for the gradient of all tokens' input, of which every rank has a partial sum: adds to `dx`.
    pub(super) fn backward(
        self,
        BranchInput { branch, x }: BranchInput<'_>,
        partial: &Tensor,
        dx: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let forward = &pass.forward;
        let dnormed = forward.ctx.token_exchange(forward.layer)?.reduce_scatter(partial)?;
        branch.backward_enter(&dnormed, x, &self.rstd, dx, pass)?;
        recycle_unless(self.own, x, forward);
        forward.recycle([self.all, self.rstd, dnormed]);
        Ok(())
    }
}
