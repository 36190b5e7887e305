//! RMSNorm (arXiv 1910.07467), and LayerNorm without a bias (arXiv 1607.06450).

use super::{BackwardPass, ForwardPass, Init, LayerError, Parameter, ParameterList};
use candle_core::Tensor;
use ulysses_kernels::rms_norm::{self, Gain};

/// The constants of a model's norms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormConfig {
    /// Added to the mean square.
    pub eps: f64,
    /// Added to the weight: 0, or 1 for weights around 0.
    pub offset: f64,
    /// Whether the mean is subtracted first: LayerNorm.
    pub centered: bool,
}

impl From<f64> for NormConfig {
    fn from(eps: f64) -> Self {
        Self { eps, offset: 0.0, centered: false }
    }
}

impl NormConfig {
    /// Initial weights: a gain of 1.
    pub fn init(&self) -> Init {
        if self.offset == 0.0 { Init::Ones } else { Init::Zeros }
    }

    /// The gain of a weight.
    pub fn gain<'a>(&self, weight: &'a Tensor) -> Gain<'a> {
        Gain { weight, offset: self.offset as f32, centered: self.centered }
    }
}

/// `y = x / sqrt(mean(x²) + eps) · (offset + w)`, over the last dimension; of x without its mean if it is centered.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Parameter,
    config: NormConfig,
}

impl RmsNorm {
    /// Adds the parameter `name.weight`, `[size]`.
    pub fn new(parameters: &mut ParameterList, name: &str, size: usize, config: NormConfig) -> Self {
        let weight = parameters.add(&format!("{name}.weight"), [size], config.init());
        Self { weight, config }
    }

    fn gain<'a>(&self, pass: &'a ForwardPass<'_>) -> Gain<'a> {
        self.config.gain(&pass[self.weight])
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
        rms_norm::forward(x, self.gain(pass), self.config.eps, &y, rstd)?;
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
        let gain = self.gain(&pass.forward);
        Ok(rms_norm::backward(dy, x, gain, rstd, dx, accumulate, pass.gradient(self.weight))?)
    }
}
