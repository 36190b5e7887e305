//! RMSNorm (arXiv 1910.07467).

use super::{BackwardPass, ForwardPass, Init, LayerError, Parameter, ParameterList};
use candle_core::Tensor;
use ulysses_kernels::rms_norm;

/// `y = x / sqrt(mean(x²) + eps) · w`, over the last dimension.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Parameter,
    eps: f64,
}

impl RmsNorm {
    /// Adds the parameter `name.weight`, `[size]`.
    pub fn new(parameters: &mut ParameterList, name: &str, size: usize, eps: f64) -> Self {
        Self { weight: parameters.add(&format!("{name}.weight"), [size], Init::Ones), eps }
    }

    /// Returns the normalized `x`, and writes the reciprocal root mean squares to `rstd`.
    ///
    /// # Shapes
    /// `x`, result: `[…, size]`, `rstd`: `[…]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(&self, x: &Tensor, rstd: &Tensor, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
        let y = pass.workspace().alloc(x.dims())?;
        rms_norm::forward(x, &pass[self.weight], self.eps, &y, rstd)?;
        Ok(y)
    }

    /// Adds to the weight's gradient, unless it is frozen, and writes the gradient of `x`, or adds to it.
    ///
    /// # Shapes
    /// `dy`, `x`, `dx`: `[…, size]`; `rstd`: `[…]`, as the forward pass wrote it.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        rstd: &Tensor,
        (dx, accumulate): (&Tensor, bool),
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let weight = &pass.forward[self.weight];
        Ok(rms_norm::backward(dy, x, weight, rstd, dx, accumulate, pass.gradient(self.weight))?)
    }
}
