//! RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450).

use super::{
    BackwardPass, ForwardPass, Init, LayerError, Parameter, ParameterList, add_bias, add_bias_gradient,
};
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
    /// Whether a bias is added last.
    pub bias: bool,
}

impl From<f64> for NormConfig {
    fn from(eps: f64) -> Self {
        Self { eps, offset: 0.0, centered: false, bias: false }
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

/// `y = x / sqrt(mean(x²) + eps) · (offset + w) + b`, over the last dimension; of x without its mean if it is centered.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Parameter,
    bias: Option<Parameter>,
    config: NormConfig,
}

impl RmsNorm {
    /// Adds the parameter `name.weight`, `[size]`, and `name.bias` if there is one.
    pub fn new(parameters: &mut ParameterList, name: &str, size: usize, config: NormConfig) -> Self {
        let weight = parameters.add(&format!("{name}.weight"), [size], config.init());
        let bias = config.bias.then(|| parameters.add(&format!("{name}.bias"), [size], Init::Zeros));
        Self { weight, bias, config }
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
        if let Some(bias) = self.bias {
            add_bias(&pass[bias], &y, true, pass.workspace())?;
        }
        Ok(y)
    }

    /// Adds to the gradients of weight and bias, unless they are frozen, and writes the gradient of `x`, or adds to it.
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
        if let Some(dbias) = self.bias.and_then(|bias| pass.gradient(bias)) {
            add_bias_gradient(dy, dbias, pass.ctx().workspace())?;
        }
        let gain = self.gain(&pass.forward);
        Ok(rms_norm::backward(dy, x, gain, rstd, dx, accumulate, pass.gradient(self.weight))?)
    }
}
