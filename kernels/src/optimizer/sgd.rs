//! Stochastic gradient descent with momentum, in the form of `torch.optim.SGD` (dampening 0).

use super::elementwise::{self, Rule};
use super::{ElementStep, check_step};
use crate::OpError;
use crate::arg_check::ArgCheck;
use crate::simd::Isa;
use bytemuck::NoUninit;
use candle_core::Tensor;

/// Hyper-parameters of one [`step`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdParams {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the momentum buffer; with 0 there is no buffer.
    pub momentum: f64,
    /// Nesterov's look-ahead: the update is g + momentum · buffer.
    pub nesterov: bool,
    /// Added to the gradient as weight_decay · parameter.
    pub weight_decay: f64,
    /// t, counted from 1. The first step sets the momentum buffer to g without reading it.
    pub step: u64,
    /// Factor on the gradient: loss unscaling and clipping in one.
    pub grad_scale: f64,
}

/// One optimizer step; param and the momentum buffer are updated in place.
///
/// With g = grad · grad_scale + weight_decay · p: b ← momentum · b + g (b ← g at the first step), then
/// p ← p − lr · b, or p − lr · (g + momentum · b) with Nesterov, or p − lr · g without momentum.
///
/// # Shapes
/// All tensors hold the same number of elements.
///
/// # Errors
/// A `step` of 0, a negative momentum, momentum without a buffer, Nesterov without momentum, shapes, dtypes,
/// devices or layouts that do not match, or two tensors that share storage.
pub fn step(
    param: &Tensor,
    grad: &Tensor,
    momentum_buffer: Option<&Tensor>,
    params: &SgdParams,
) -> Result<(), OpError> {
    match momentum_buffer {
        Some(buffer) if params.momentum > 0.0 => elementwise::step(params, [param, buffer], grad),
        None if params.momentum > 0.0 => params.refuse_momentum(),
        _ => elementwise::step(params, [param], grad),
    }
}

impl ElementStep for SgdParams {
    fn step(&self, param: &Tensor, grad: &Tensor, state: &[Tensor]) -> Result<(), OpError> {
        step(param, grad, state.first(), self)
    }

    fn step_on_host(&self, param: &mut [f32], grad: &[f32], state: &mut [&mut [f32]]) -> Result<(), OpError> {
        match state {
            [buffer, ..] if self.momentum > 0.0 => elementwise::step_on_host(self, [param, buffer], grad),
            [] if self.momentum > 0.0 => self.refuse_momentum(),
            _ => elementwise::step_on_host(self, [param], grad),
        }
    }
}

impl SgdParams {
    fn refuse_momentum(&self) -> Result<(), OpError> {
        let expected = "0 (there is no momentum buffer)";
        ArgCheck::new(<SgdParams as Rule<1>>::OP).expect_value("momentum", self.momentum, false, expected)
    }

    fn check(&self, call: ArgCheck) -> Result<(), OpError> {
        let Self { momentum, nesterov, .. } = *self;
        check_step(call, self.step)?;
        let expected = if nesterov { "a positive number (Nesterov)" } else { "0 or a positive number" };
        call.expect_value("momentum", momentum, momentum > 0.0 || (momentum == 0.0 && !nesterov), expected)
    }

    fn constants(&self) -> Constants {
        Constants {
            lr: self.lr as f32,
            momentum: self.momentum as f32,
            weight_decay: self.weight_decay as f32,
            grad_scale: self.grad_scale as f32,
            is_nesterov: self.nesterov.into(),
            is_first: (self.step == 1).into(),
        }
    }
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
pub(super) struct Constants {
    lr: f32,
    momentum: f32,
    weight_decay: f32,
    grad_scale: f32,
    is_nesterov: u32,
    is_first: u32,
}

impl Constants {
    #[inline(always)]
    fn decayed<S: Isa>(&self, param: f32, grad: f32) -> f32 {
        S::mul_add(self.weight_decay, param, grad * self.grad_scale)
    }
}

/// Without momentum.
impl Rule<1> for SgdParams {
    const OP: &'static str = "sgd::step";
    const KERNEL: &'static str = "sgd_step";
    const TENSORS: [&'static str; 1] = ["param"];
    type Constants = Constants;

    fn check(&self, call: ArgCheck) -> Result<(), OpError> {
        self.check(call)
    }

    fn constants(&self) -> Constants {
        self.constants()
    }

    #[inline(always)]
    fn update<S: Isa>(c: &Constants, [p]: &mut [f32; 1], grad: f32) {
        *p = S::mul_add(-c.lr, c.decayed::<S>(*p, grad), *p);
    }
}

/// With momentum.
impl Rule<2> for SgdParams {
    const OP: &'static str = "sgd::step";
    const KERNEL: &'static str = "sgd_step_with_momentum";
    const TENSORS: [&'static str; 2] = ["param", "momentum_buffer"];
    type Constants = Constants;

    fn check(&self, call: ArgCheck) -> Result<(), OpError> {
        self.check(call)
    }

    fn constants(&self) -> Constants {
        self.constants()
    }

    #[inline(always)]
    fn update<S: Isa>(c: &Constants, [p, b]: &mut [f32; 2], grad: f32) {
        let g = c.decayed::<S>(*p, grad);
        // The first step ignores the buffer: it may hold anything, even NaN.
        *b = if c.is_first != 0 { g } else { S::mul_add(c.momentum, *b, g) };
        let update = if c.is_nesterov != 0 { S::mul_add(c.momentum, *b, g) } else { *b };
        *p = S::mul_add(-c.lr, update, *p);
    }
}
