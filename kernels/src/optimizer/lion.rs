//! Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2): every parameter moves by
//! the learning rate, in the direction of an interpolated momentum. One state tensor, half of Adam's.

use super::elementwise::{self, Rule};
use super::{Step, check_betas};
use crate::OpError;
use crate::arg_check::ArgCheck;
use crate::simd::Isa;
use bytemuck::NoUninit;
use candle_core::Tensor;

/// A step that updates the state `exp_avg`, m.
///
/// With g = grad · grad_scale: c = β₁m + (1 − β₁)g; p ← p · (1 − lr · weight_decay) − lr · sign(c);
/// m ← β₂m + (1 − β₂)g. The sign of 0 is 0, that of NaN is NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionParams {
    /// The step, with its learning rate: the distance that every parameter moves.
    pub step: Step,
    /// Weight of the momentum against the gradient in the direction of this step, at least 0 and below 1.
    pub beta1: f64,
    /// Decay of the momentum, at least 0 and below 1.
    pub beta2: f64,
    /// Weight decay, decoupled: parameters shrink by lr · weight_decay.
    pub weight_decay: f64,
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
        let Step { lr, grad_scale, .. } = self.step;
        Constants {
            grad_scale: grad_scale as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            lr: lr as f32,
            decay: (lr * self.weight_decay) as f32,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::ElementStep;
    use crate::optimizer::tests::{Formula, STEP, rule_tests};
    use crate::testing::*;

    const PARAMS: LionParams = LionParams { step: STEP, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };

    impl Formula<2> for LionParams {
        fn modes(step: Step) -> Vec<Self> {
            [0.0, 0.1].map(|weight_decay| Self { step, weight_decay, ..PARAMS }).into()
        }

        /// Algorithm 2 of the paper, line by line.
        fn formula(&self, [p, m]: &mut [f64; 2], grad: f64) {
            let Self { step: Step { lr, grad_scale, .. }, beta1, beta2, weight_decay } = *self;
            let g = grad * grad_scale;
            let c = beta1 * *m + (1.0 - beta1) * g;
            let sign = if c == 0.0 { 0.0 } else { c.signum() };
            *p -= lr * (sign + weight_decay * *p);
            *m = beta2 * *m + (1.0 - beta2) * g;
        }
    }

    rule_tests!(LionParams, 2);

    #[test]
    fn the_momentum_outvotes_a_small_gradient_and_a_zero_direction_stays() {
        on_every_target(|_| {
            let (param, grad, m) =
                (tensor(&[2.0; 3], &[3]), tensor(&[-0.5, -2.0, 0.0], &[3]), tensor(&[0.1, 0.1, 0.0], &[3]));
            let step = Step { grad_scale: 1.0, ..STEP };
            LionParams { step, weight_decay: 0.0, ..PARAMS }
                .apply(&param, &grad, std::slice::from_ref(&m))
                .unwrap();
            assert_close("param", &read(&param), &[2.0 - 1e-2, 2.0 + 1e-2, 2.0], 1e-7);
            assert_close("exp_avg", &read(&m), &[0.094, 0.079, 0.0], 1e-6);
        });
    }

    #[test]
    fn a_gradient_that_is_not_a_number_shows_in_the_parameter() {
        on_every_target(|target| {
            let (param, grad, m) = (tensor(&[2.0], &[1]), tensor(&[f32::NAN], &[1]), tensor(&[0.0], &[1]));
            PARAMS.apply(&param, &grad, &[m]).unwrap();
            assert!(param.to_vec1::<f32>().unwrap()[0].is_nan(), "{target}");
        });
    }

    #[test]
    fn a_wrong_beta_is_named() {
        let zeros = || tensor(&[0.0; 4], &[4]);
        let error = LionParams { beta1: 1.0, ..PARAMS }.apply(&zeros(), &zeros(), &[zeros()]).unwrap_err();
        assert_eq!(error.to_string(), "lion::step: `beta1` is 1, expected at least 0 and below 1");
    }
}
