//! The last part of a model: from the hidden states of the last layer to a loss.
//!
//! - [`Objective`]: the trait that the engine calls. The loss of a step is the sum of all terms of the global batch
//!   divided by their number.
//! - [`CausalLm`]: cross-entropy of the next token, in tiles; it computes only [`LabeledTokens`]. The ranks of tp divide its vocabulary.
//! - [`AutogradObjective`]: any loss written with candle ops.

mod autograd;
mod causal_lm;
mod labeled_tokens;
#[cfg(test)]
mod tests;

pub use autograd::{AutogradObjective, LossTerms};
pub use causal_lm::CausalLm;
pub use labeled_tokens::LabeledTokens;

pub use ulysses_kernels::lm_head_loss::Losses;

use crate::nn::{LayerContext, LayerError, LocalBatch, ParameterSpec, Saved, TensorRank};
use candle_core::Tensor;

/// The last part of a model, with its loss.
///
/// With sequence parallelism it gets only this rank's tokens, so its loss must be a sum of terms of single tokens. A token
/// that is labeled −100 must have no term: it may be padding. A rank without terms contributes zeros.
///
/// The engine owns the parameters, as for a [`Layer`](crate::nn::Layer): the saved state may hold `x`, but no view of a
/// parameter. The losses must not share storage with `x`.
pub trait Objective: Send + Sync {
    /// Name for messages, reports and checkpoints.
    fn name(&self) -> &str;

    /// The parameters, in the order of `params` and `grads`. One that has the name of a parameter of the model's input
    /// is the same parameter.
    fn parameters(&self) -> &[ParameterSpec];

    /// The part of the objective that one rank of tp has; `None` for one that stays whole, and computes each rank's tokens there.
    fn tensor_parallel(&self, tp: TensorRank) -> Option<Box<dyn Objective>> {
        let _ = tp;
        None
    }

    /// Computes the terms of the loss on this rank.
    ///
    /// # Shapes
    /// `x`: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A batch that does not fit, or a refused operation.
    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<(Losses, Saved), LayerError>;

    /// Backward of `scale · Σ terms`: **adds** the parameters' gradients to `grads`, unless they are frozen, and
    /// returns the gradient of `x`.
    ///
    /// # Shapes
    /// Result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A refused operation.
    fn backward(
        &self,
        params: &[Tensor],
        saved: Saved,
        scale: f32,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError>;

    /// As [`forward`](Self::forward), without a backward pass: may recycle `x`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn evaluate(
        &self,
        params: &[Tensor],
        x: Tensor,
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<Losses, LayerError> {
        let (losses, _) = self.forward(params, &x, batch, ctx)?;
        ctx.workspace().recycle(x);
        Ok(losses)
    }

    /// The model's output for each of this rank's tokens, for evaluation and checks: logits, or by default the hidden
    /// states.
    ///
    /// # Shapes
    /// `x`: `[batch, seq_local, hidden]`; result: `[batch, seq_local, width]`.
    ///
    /// # Errors
    /// A refused operation.
    fn output(&self, params: &[Tensor], x: &Tensor, ctx: &LayerContext) -> Result<Tensor, LayerError> {
        let _ = (params, ctx);
        Ok(x.copy()?)
    }
}
