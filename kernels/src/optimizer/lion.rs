//! Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2): every parameter moves by
//! the learning rate, in the direction of an interpolated momentum. One state tensor, half of Adam's.

use super::check_betas;
use super::elementwise::{self, Rule};
use crate::OpError;
use crate::arg_check::ArgCheck;
use crate::simd::Isa;
use bytemuck::NoUninit;
use candle_core::Tensor;

/// Hyper-parameters of one [`step`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionParams {
    /// Learning rate of this step: the distance that every parameter moves.
    pub lr: f64,
    /// Weight of the momentum against the gradient in the direction of this step.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Weight decay, decoupled: parameters shrink by lr · weight_decay.
    pub weight_decay: f64,
    /// Factor on the gradient: loss unscaling and clipping in one.
    pub grad_scale: f64,
}

/// One optimizer step; param and exp_avg are updated in place.
///
/// With g = grad · grad_scale: c = β₁m + (1 − β₁)g; p ← p · (1 − lr · weight_decay) − lr · sign(c);
/// m ← β₂m + (1 − β₂)g. The sign of 0 is 0, that of NaN is NaN.
///
/// # Shapes
/// All tensors hold the same number of elements.
///
/// # Errors
/// A β outside of [0, 1), shapes, dtypes, devices or layouts that do not match, or two tensors that share
/// storage.
pub fn step(param: &Tensor, grad: &Tensor, exp_avg: &Tensor, params: &LionParams) -> Result<(), OpError> {
    elementwise::step(params, [param, exp_avg], grad)
}

elementwise::element_step!(LionParams, exp_avg);

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
pub(super) struct Constants {
    grad_scale: f32,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    lr: f32,
    /// The fraction of a parameter that decay removes.
    decay: f32,
}

impl Rule<2> for LionParams {
    const OP: &'static str = "lion::step";
    const KERNEL: &'static str = "lion_step";
    const TENSORS: [&'static str; 2] = ["param", "exp_avg"];
    type Constants = Constants;

    fn check(&self, call: ArgCheck) -> Result<(), OpError> {
        check_betas(call, self.beta1, self.beta2)
    }

    fn constants(&self) -> Constants {
        Constants {
            grad_scale: self.grad_scale as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            lr: self.lr as f32,
            decay: (self.lr * self.weight_decay) as f32,
        }
    }

    #[inline(always)]
    fn update<S: Isa>(c: &Constants, [p, m]: &mut [f32; 2], grad: f32) {
        let g = grad * c.grad_scale;
        let direction = S::mul_add(c.one_minus_beta1, g - *m, *m);
        let decayed = S::mul_add(-c.decay, *p, *p);
        *p = S::mul_add(-c.lr, sign(direction), decayed);
        *m = S::mul_add(c.one_minus_beta2, g - *m, *m);
    }
}

/// 1, −1 or 0, and NaN for NaN.
#[inline(always)]
fn sign(x: f32) -> f32 {
    if x > 0.0 {
        1.0
    } else if x < 0.0 {
        -1.0
    } else {
        x
    }
}
