//! [`AutogradObjective`]: any loss written with candle ops.

use super::Objective;
use crate::nn::{AutogradGraph, LayerContext, LayerError, LocalBatch, ParameterSpec, Saved};
use candle_core::{DType, Result, Tensor};
use ulysses_kernels::lm_head_loss::Losses;

/// The terms of a loss on one rank.
#[derive(Debug)]
pub struct LossTerms {
    /// Their sum, a scalar.
    pub sum: Tensor,
    /// The number of tokens with a term. The loss of a step is the sum over all ranks divided by this number over all ranks.
    pub tokens: u64,
}

/// A loss written with candle ops, with candle's autograd for it: parameters, hidden states and loss are f32, whatever the
/// precision of the model. It treats tokens independently, and every op is differentiable in candle, as in an
/// [`AutogradLayer`](crate::nn::AutogradLayer).
///
/// # Examples
///
/// The mean squared error between the last hidden states and the batch's values `target`, on tokens that are no padding:
///
/// ```
/// use ulysses::candle::{D, Result, Tensor};
/// use ulysses::nn::LocalBatch;
/// use ulysses::objective::{AutogradObjective, LossTerms};
///
/// fn squared_error(_: &[Tensor], x: &Tensor, batch: &LocalBatch<'_>) -> Result<LossTerms> {
///     let error = (x - batch.tensor("target", x.dtype(), x.device())?)?;
///     let of_tokens = error.sqr()?.mean_keepdim(D::Minus1)?;
///     let sum = (of_tokens * batch.has_label(x.dtype(), x.device())?)?.sum_all()?;
///     Ok(LossTerms { sum, tokens: batch.num_labels() })
/// }
/// let objective = AutogradObjective::new("mse", vec![], squared_error);
/// ```
pub struct AutogradObjective<F> {
    name: String,
    parameters: Vec<ParameterSpec>,
    loss: F,
}

/// The graph, and the number of its tokens with a term.
struct SavedLoss {
    graph: AutogradGraph,
    tokens: u64,
}

impl<F> AutogradObjective<F>
where
    F: Fn(&[Tensor], &Tensor, &LocalBatch<'_>) -> Result<LossTerms> + Send + Sync,
{
    /// Creates an objective with `parameters` that computes `loss(parameters, x, batch)`.
    pub fn new(name: impl Into<String>, parameters: Vec<ParameterSpec>, loss: F) -> Self {
        Self { name: name.into(), parameters, loss }
    }

    /// Computes the terms in f32.
    fn terms(&self, params: &[Tensor], x: &Tensor, batch: &LocalBatch<'_>) -> Result<LossTerms> {
        let params = params.iter().map(|param| param.to_dtype(DType::F32)).collect::<Result<Vec<_>>>()?;
        let LossTerms { sum, tokens } = (self.loss)(&params, &x.to_dtype(DType::F32)?, batch)?;
        Ok(LossTerms { sum: sum.to_dtype(DType::F32)?, tokens })
    }

    fn losses(&self, sum: &Tensor, tokens: u64) -> std::result::Result<Losses, LayerError> {
        if sum.elem_count() != 1 {
            let (objective, got) = (self.name.clone(), sum.dims().to_vec());
            return Err(LayerError::LossOutput { objective, got });
        }
        Ok(Losses::from_tensor(sum.detach().reshape(1)?.force_contiguous()?, tokens))
    }
}

impl<F> Objective for AutogradObjective<F>
where
    F: Fn(&[Tensor], &Tensor, &LocalBatch<'_>) -> Result<LossTerms> + Send + Sync,
{
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        batch: &LocalBatch<'_>,
        _: &LayerContext,
    ) -> std::result::Result<(Losses, Saved), LayerError> {
        let mut tokens = 0;
        let graph = AutogradGraph::record(params, x, |params, x| {
            let terms = self.terms(params, x, batch)?;
            tokens = terms.tokens;
            Ok(terms.sum)
        })?;
        let (losses, bytes) = (self.losses(graph.output(), tokens)?, graph.bytes());
        Ok((losses, Saved::new(SavedLoss { graph, tokens }, bytes)))
    }

    fn backward(
        &self,
        _: &[Tensor],
        saved: Saved,
        scale: f32,
        grads: &[Option<Tensor>],
        _: &LayerContext,
    ) -> std::result::Result<Tensor, LayerError> {
        let SavedLoss { graph, tokens } = saved.downcast(&self.name)?;
        // candle finds no gradients behind a constant or a factor of 0.
        if tokens == 0 || scale == 0.0 {
            return Ok(graph.input().zeros_like()?);
        }
        let scaled = (graph.output() * f64::from(scale))?;
        graph.backward(&format!("objective {}", self.name), scaled, &self.parameters, grads)
    }

    fn evaluate(
        &self,
        params: &[Tensor],
        x: Tensor,
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> std::result::Result<Losses, LayerError> {
        let LossTerms { sum, tokens } = self.terms(params, &x, batch)?;
        let losses = self.losses(&sum, tokens)?;
        ctx.workspace().recycle(x);
        Ok(losses)
    }
}
