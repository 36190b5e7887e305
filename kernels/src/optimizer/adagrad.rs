//! Adagrad (Duchi et al. 2011) in the form of `torch.optim.Adagrad`: steps shrink with the sum of all squared
//! gradients so far.

use super::check_step;
use super::elementwise::{self, Rule};
use crate::OpError;
use crate::arg_check::ArgCheck;
use crate::simd::Isa;
use bytemuck::NoUninit;
use candle_core::Tensor;

/// Hyper-parameters of one [`step`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdagradParams {
    /// Learning rate of this step, before `lr_decay`.
    pub lr: f64,
    /// The learning rate is divided by 1 + (t − 1) · lr_decay; 0 for none.
    pub lr_decay: f64,
    /// Added to the root of the sum of squares.
    pub eps: f64,
    /// Added to the gradient as weight_decay · parameter.
    pub weight_decay: f64,
    /// t, counted from 1.
    pub step: u64,
    /// Factor on the gradient: loss unscaling and clipping in one.
    pub grad_scale: f64,
}

/// One optimizer step; param and state_sum are updated in place. The caller sets state_sum to its initial value
/// (PyTorch's `initial_accumulator_value`, usually 0) before the first.
///
/// With g = grad · grad_scale + weight_decay · p: s ← s + g²;
/// p ← p − lr / (1 + (t − 1) · lr_decay) · g / (√s + ε).
///
/// # Shapes
/// All tensors hold the same number of elements.
///
/// # Errors
/// A `step` of 0, a negative `lr_decay`, shapes, dtypes, devices or layouts that do not match, or two tensors
/// that share storage.
pub fn step(
    param: &Tensor,
    grad: &Tensor,
    state_sum: &Tensor,
    params: &AdagradParams,
) -> Result<(), OpError> {
    elementwise::step(params, [param, state_sum], grad)
}

elementwise::element_step!(AdagradParams, state_sum);

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
pub(super) struct Constants {
    grad_scale: f32,
    weight_decay: f32,
    /// lr / (1 + (t − 1) · lr_decay)
    step_size: f32,
    eps: f32,
}

impl Rule<2> for AdagradParams {
    const OP: &'static str = "adagrad::step";
    const KERNEL: &'static str = "adagrad_step";
    const TENSORS: [&'static str; 2] = ["param", "state_sum"];
    type Constants = Constants;

    fn check(&self, call: ArgCheck) -> Result<(), OpError> {
        check_step(call, self.step)?;
        call.expect_value("lr_decay", self.lr_decay, self.lr_decay >= 0.0, "0 or a positive number")
    }

    fn constants(&self) -> Constants {
        let steps_before = (self.step - 1) as f64;
        Constants {
            grad_scale: self.grad_scale as f32,
            weight_decay: self.weight_decay as f32,
            step_size: (self.lr / (1.0 + steps_before * self.lr_decay)) as f32,
            eps: self.eps as f32,
        }
    }

    #[inline(always)]
    fn update<S: Isa>(c: &Constants, [p, s]: &mut [f32; 2], grad: f32) {
        let g = S::mul_add(c.weight_decay, *p, grad * c.grad_scale);
        *s = S::mul_add(g, g, *s);
        *p = S::mul_add(-c.step_size, g / (s.sqrt() + c.eps), *p);
    }
}
