//! Adagrad (Duchi et al. 2011) in the form of `torch.optim.Adagrad`: steps shrink with the sum of all squared
//! gradients so far.

use super::elementwise::{self, Rule};
use super::{Step, check_step};
use crate::OpError;
use crate::arg_check::ArgCheck;
use crate::simd::Isa;
use bytemuck::NoUninit;
use candle_core::Tensor;

/// A step that updates the state `state_sum`, s. The caller sets it to its initial value (PyTorch's
/// `initial_accumulator_value`, usually 0) before the first.
///
/// With g = grad · grad_scale + weight_decay · p: s ← s + g²;
/// p ← p − lr / (1 + (t − 1) · lr_decay) · g / (√s + ε).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdagradParams {
    /// The step, with its learning rate before `lr_decay`.
    pub step: Step,
    /// The learning rate is divided by 1 + (t − 1) · lr_decay. At least 0; 0 for none.
    pub lr_decay: f64,
    /// Added to the root of the sum of squares.
    pub eps: f64,
    /// Added to the gradient as weight_decay · parameter.
    pub weight_decay: f64,
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
        let Step { number, lr, grad_scale } = self.step;
        let steps_before = (number - 1) as f64;
        Constants {
            grad_scale: grad_scale as f32,
            weight_decay: self.weight_decay as f32,
            step_size: (lr / (1.0 + steps_before * self.lr_decay)) as f32,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::ElementStep;
    use crate::optimizer::tests::{Formula, STEP, rule_tests};
    use crate::testing::*;

    const PARAMS: AdagradParams = AdagradParams { step: STEP, lr_decay: 0.0, eps: 1e-10, weight_decay: 0.1 };

    impl Formula<2> for AdagradParams {
        const INITIAL_STATE: &'static [f32] = &[0.0, 0.25];

        fn modes(step: Step) -> Vec<Self> {
            let modes = [(0.0, 0.0), (0.5, 0.1), (0.0, 0.1)];
            modes.map(|(lr_decay, weight_decay)| Self { step, lr_decay, weight_decay, ..PARAMS }).into()
        }

        fn formula(&self, [p, s]: &mut [f64; 2], grad: f64) {
            let Self { step: Step { number, lr, grad_scale }, lr_decay, eps, weight_decay } = *self;
            let g = grad * grad_scale + weight_decay * *p;
            *s += g * g;
            *p -= lr / (1.0 + (number as f64 - 1.0) * lr_decay) * g / (s.sqrt() + eps);
        }
    }

    rule_tests!(AdagradParams, 2);

    #[test]
    fn equal_gradients_move_by_the_learning_rate_over_the_root_of_the_step() {
        on_every_target(|_| {
            let (param, grad, sum) =
                (tensor(&[1.0; 2], &[2]), tensor(&[3.0, -3.0], &[2]), tensor(&[0.0; 2], &[2]));
            let mut moved = 0.0;
            for t in 1..=4 {
                let params = AdagradParams { step: Step { number: t, ..STEP }, weight_decay: 0.0, ..PARAMS };
                params.apply(&param, &grad, std::slice::from_ref(&sum)).unwrap();
                moved += 1e-2 / (t as f64).sqrt();
            }
            assert_close("param", &read(&param), &[1.0 - moved, 1.0 + moved], 2e-7);
        });
    }

    #[test]
    fn wrong_arguments_are_named() {
        let zeros = || tensor(&[0.0; 4], &[4]);
        let error =
            |params: AdagradParams| params.apply(&zeros(), &zeros(), &[zeros()]).unwrap_err().to_string();
        let zeroth = AdagradParams { step: Step { number: 0, ..STEP }, ..PARAMS };
        assert_eq!(error(zeroth), "adagrad::step: `step` is 0, expected at least 1");
        let expected = "adagrad::step: `lr_decay` is -1, expected 0 or a positive number";
        assert_eq!(error(AdagradParams { lr_decay: -1.0, ..PARAMS }), expected);
    }
}
