//! Stochastic gradient descent with momentum, in the form of `torch.optim.SGD` (dampening 0).

use super::elementwise::{self, Rule};
use super::{ElementStep, Step, check_step};
use crate::OpError;
use crate::arg_check::ArgCheck;
use crate::simd::Isa;
use bytemuck::NoUninit;
use candle_core::Tensor;

/// A step that updates the state `momentum_buffer`, b. Without momentum there need not be one, and it is not read.
///
/// With g = grad · grad_scale + weight_decay · p: b ← momentum · b + g (b ← g at the first step, whatever b is), then
/// p ← p − lr · b, or p − lr · (g + momentum · b) with Nesterov, or p − lr · g without momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdParams {
    /// The step, with its learning rate.
    pub step: Step,
    /// Decay of the momentum buffer, at least 0. With 0 there need not be a buffer, otherwise a missing one is an error.
    pub momentum: f64,
    /// Nesterov's look-ahead: the update is g + momentum · buffer. Only with a positive momentum.
    pub nesterov: bool,
    /// Added to the gradient as weight_decay · parameter.
    pub weight_decay: f64,
}

impl ElementStep for SgdParams {
    fn apply(&self, param: &Tensor, grad: &Tensor, state: &[Tensor]) -> Result<(), OpError> {
        match state {
            [buffer, ..] if self.momentum > 0.0 => elementwise::step(self, [param, buffer], grad),
            [] if self.momentum > 0.0 => self.refuse_momentum(),
            _ => elementwise::step(self, [param], grad),
        }
    }

    fn apply_on_host(
        &self,
        param: &mut [f32],
        grad: &[f32],
        state: &mut [&mut [f32]],
    ) -> Result<(), OpError> {
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
        let Step { number, lr, grad_scale } = self.step;
        Constants {
            lr: lr as f32,
            momentum: self.momentum as f32,
            weight_decay: self.weight_decay as f32,
            grad_scale: grad_scale as f32,
            is_nesterov: self.nesterov.into(),
            is_first: (number == 1).into(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::tests::{Formula, STEP, rule_tests};
    use crate::testing::*;

    const PARAMS: SgdParams = SgdParams { step: STEP, momentum: 0.0, nesterov: false, weight_decay: 0.0 };

    mod without_momentum {
        use super::*;

        impl Formula<1> for SgdParams {
            const NUM_STEPS: u64 = 5;
            const TOLERANCE: f64 = 5e-7;

            fn modes(step: Step) -> Vec<Self> {
                [0.0, 0.1].map(|weight_decay| Self { step, weight_decay, ..PARAMS }).into()
            }

            fn formula(&self, [p]: &mut [f64; 1], grad: f64) {
                *p -= self.step.lr * (grad * self.step.grad_scale + self.weight_decay * *p);
            }
        }

        rule_tests!(SgdParams, 1);
    }

    mod with_momentum {
        use super::*;

        impl Formula<2> for SgdParams {
            /// The buffer's first content must not matter.
            const INITIAL_STATE: &'static [f32] = &[f32::NAN];
            const NUM_STEPS: u64 = 5;
            const TOLERANCE: f64 = 5e-7;

            fn modes(step: Step) -> Vec<Self> {
                let modes = [(false, 0.1), (true, 0.0), (true, 0.1)];
                let of = |(nesterov, weight_decay)| Self { step, momentum: 0.9, nesterov, weight_decay };
                modes.map(of).into()
            }

            fn formula(&self, [p, b]: &mut [f64; 2], grad: f64) {
                let Self { step: Step { number, lr, grad_scale }, momentum, nesterov, weight_decay } = *self;
                let g = grad * grad_scale + weight_decay * *p;
                *b = if number > 1 { momentum * *b + g } else { g };
                *p -= lr * if nesterov { g + momentum * *b } else { *b };
            }
        }

        rule_tests!(SgdParams, 2);
    }

    #[test]
    fn momentum_remembers_the_gradient_of_the_step_before() {
        on_every_target(|_| {
            let (param, buffer) = (tensor(&[0.0], &[1]), output(&[1]));
            for (number, grad) in [(1, 1.0), (2, 0.0)] {
                let step = Step { number, lr: 0.1, grad_scale: 1.0 };
                let params = SgdParams { step, momentum: 0.5, ..PARAMS };
                params.apply(&param, &tensor(&[grad], &[1]), std::slice::from_ref(&buffer)).unwrap();
            }
            assert_close("param", &read(&param), &[-0.1 - 0.05], 1e-7);
        });
    }

    #[test]
    fn wrong_arguments_are_named() {
        let zeros = || tensor(&[0.0; 4], &[4]);
        let expected = "sgd::step: `momentum` is 0.9, expected 0 (there is no momentum buffer)";
        let params = SgdParams { momentum: 0.9, ..PARAMS };
        assert_eq!(params.apply(&zeros(), &zeros(), &[]).unwrap_err().to_string(), expected);
        let error = params.apply_on_host(&mut [0.0; 3], &[0.0; 3], &mut []).unwrap_err();
        assert_eq!(error.to_string(), expected);
        let params = SgdParams { nesterov: true, ..PARAMS };
        let error = params.apply(&zeros(), &zeros(), &[zeros()]).unwrap_err();
        assert!(matches!(error, OpError::InvalidValue { argument: "momentum", .. }), "{error}");
    }
}
