//! Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), with the order of operations of
//! `torch.optim.AdamW` and `torch.optim.Adam`.

use super::elementwise::{self, Rule};
use super::{check_betas, check_step};
use crate::OpError;
use crate::arg_check::ArgCheck;
use crate::simd::Isa;
use bytemuck::NoUninit;
use candle_core::Tensor;

/// Hyper-parameters of one [`step`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamParams {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay, 0 for none.
    pub weight_decay: f64,
    /// `true`: AdamW, parameters shrink by lr · weight_decay. `false`: Adam, weight_decay · parameter is
    /// added to the gradient.
    pub decoupled: bool,
    /// Whether the moments are divided by 1 − βᵗ.
    pub bias_correction: bool,
    /// t, counted from 1.
    pub step: u64,
    /// Factor on the gradient: loss unscaling and clipping in one.
    pub grad_scale: f64,
}

/// One optimizer step; param, exp_avg and exp_avg_sq are updated in place.
///
/// With g = grad · grad_scale (+ weight_decay · p when not decoupled):
/// p ← p · (1 − lr · weight_decay) when decoupled; m ← m + (1 − β₁)(g − m); v ← β₂v + (1 − β₂)g²;
/// p ← p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε).
///
/// # Shapes
/// All tensors hold the same number of elements.
///
/// # Errors
/// A `step` of 0, a β outside of [0, 1), shapes, dtypes, devices or layouts that do not match, or two tensors
/// that share storage.
pub fn step(
    param: &Tensor,
    grad: &Tensor,
    exp_avg: &Tensor,
    exp_avg_sq: &Tensor,
    params: &AdamParams,
) -> Result<(), OpError> {
    elementwise::step(params, [param, exp_avg, exp_avg_sq], grad)
}

elementwise::element_step!(AdamParams, exp_avg, exp_avg_sq);

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
pub(super) struct Constants {
    grad_scale: f32,
    /// Weight decay that is added to the gradient (0 if decoupled).
    coupled_decay: f32,
    /// The fraction of a parameter that decoupled decay removes (0 if coupled). `1 − lr · weight_decay` would
    /// lose most digits of a small decay.
    decoupled_decay: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    /// lr / (1 − β₁ᵗ)
    step_size: f32,
    /// 1 / √(1 − β₂ᵗ)
    root_scale: f32,
    eps: f32,
}

impl Rule<3> for AdamParams {
    const OP: &'static str = "adamw::step";
    const KERNEL: &'static str = "adamw_step";
    const TENSORS: [&'static str; 3] = ["param", "exp_avg", "exp_avg_sq"];
    type Constants = Constants;

    fn check(&self, call: ArgCheck) -> Result<(), OpError> {
        check_step(call, self.step)?;
        check_betas(call, self.beta1, self.beta2)
    }

    fn constants(&self) -> Constants {
        let Self { lr, beta1, beta2, weight_decay, .. } = *self;
        let t = self.step as f64;
        let (correction1, correction2) = match self.bias_correction {
            true => (1.0 - beta1.powf(t), 1.0 - beta2.powf(t)),
            false => (1.0, 1.0),
        };
        Constants {
            grad_scale: self.grad_scale as f32,
            coupled_decay: if self.decoupled { 0.0 } else { weight_decay as f32 },
            decoupled_decay: if self.decoupled { (lr * weight_decay) as f32 } else { 0.0 },
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            step_size: (lr / correction1) as f32,
            root_scale: (1.0 / correction2.sqrt()) as f32,
            eps: self.eps as f32,
        }
    }

    #[inline(always)]
    fn update<S: Isa>(c: &Constants, [p, m, v]: &mut [f32; 3], grad: f32) {
        let g = S::mul_add(c.coupled_decay, *p, grad * c.grad_scale);
        *m = S::mul_add(c.one_minus_beta1, g - *m, *m);
        *v = S::mul_add(c.one_minus_beta2 * g, g, c.beta2 * *v);
        let denominator = S::mul_add(v.sqrt(), c.root_scale, c.eps);
        let decayed = S::mul_add(-c.decoupled_decay, *p, *p);
        *p = S::mul_add(-c.step_size, *m / denominator, decayed);
    }
}
