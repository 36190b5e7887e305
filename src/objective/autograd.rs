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
    /// Their number, over all ranks the divisor of the sum.
    pub count: u64,
}

/// A loss written with candle ops, with candle's autograd for it. It treats tokens independently, and every op is
/// differentiable in candle, as in an [`AutogradLayer`](crate::nn::AutogradLayer).
///
/// # Examples
///
/// The mean squared error between the last hidden states and the batch's values `target`:
///
/// ```
/// use ulysses::candle::{Result, Tensor};
/// use ulysses::nn::LocalBatch;
/// use ulysses::objective::{AutogradObjective, LossTerms};
///
/// fn squared_error(_: &[Tensor], x: &Tensor, batch: &LocalBatch<'_>) -> Result<LossTerms> {
///     let error = (x - batch.tensor("target", x.dtype(), x.device())?)?;
///     Ok(LossTerms { sum: error.sqr()?.sum_all()?, count: error.elem_count() as u64 })
/// }
/// let objective = AutogradObjective::new("mse", vec![], squared_error);
/// ```
pub struct AutogradObjective<F> {
    name: String,
    parameters: Vec<ParameterSpec>,
    loss: F,
}

impl<F> AutogradObjective<F>
where
    F: Fn(&[Tensor], &Tensor, &LocalBatch<'_>) -> Result<LossTerms> + Send + Sync,
{
    /// Creates an objective with `parameters` that computes `loss(parameters, x, batch)`.
    pub fn new(name: impl Into<String>, parameters: Vec<ParameterSpec>, loss: F) -> Self {
        Self { name: name.into(), parameters, loss }
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
        let mut count = 0;
        let graph = AutogradGraph::record(params, x, |params, x| {
            let terms = (self.loss)(params, x, batch)?;
            count = terms.count;
            Ok(terms.sum)
        })?;
        let sum = graph.output();
        if sum.elem_count() != 1 {
            let (objective, got) = (self.name.clone(), sum.dims().to_vec());
            return Err(LayerError::LossOutput { objective, got });
        }
        let losses = Losses::on_device(sum.detach().reshape(1)?.to_dtype(DType::F32)?.copy()?, count);
        let bytes = graph.bytes();
        Ok((losses, Saved::new(graph, bytes)))
    }

    fn backward(
        &self,
        _: &[Tensor],
        saved: Saved,
        scale: f32,
        grads: &[Option<Tensor>],
        _: &LayerContext,
    ) -> std::result::Result<Tensor, LayerError> {
        let graph: AutogradGraph = saved.downcast(&self.name)?;
        let scaled = (graph.output() * f64::from(scale))?;
        graph.backward(&self.name, scaled, &self.parameters, grads)
    }
}
