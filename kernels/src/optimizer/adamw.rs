//! Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), with the order of operations of
//! `torch.optim.AdamW` and `torch.optim.Adam`.

use super::elementwise::{self, Rule};
use super::{Step, check_betas, check_step};
use crate::OpError;
use crate::arg_check::ArgCheck;
use crate::simd::Isa;
use bytemuck::NoUninit;
use candle_core::Tensor;

/// A step that updates the state `exp_avg` and `exp_avg_sq`, m and v.
///
/// With g = grad · grad_scale (+ weight_decay · p when not decoupled):
/// p ← p · (1 − lr · weight_decay) when decoupled; m ← m + (1 − β₁)(g − m); v ← β₂v + (1 − β₂)g²;
/// p ← p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamParams {
    /// The step, with its learning rate.
    pub step: Step,
    /// Decay of the mean of gradients, at least 0 and below 1.
    pub beta1: f64,
    /// Decay of the mean of squared gradients, at least 0 and below 1.
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
        let Self { step: Step { number, lr, grad_scale }, beta1, beta2, weight_decay, .. } = *self;
        let t = number as f64;
        let (correction1, correction2) = match self.bias_correction {
            true => (1.0 - beta1.powf(t), 1.0 - beta2.powf(t)),
            false => (1.0, 1.0),
        };
        Constants {
            grad_scale: grad_scale as f32,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::ElementStep;
    use crate::optimizer::tests::{Formula, STEP, rule_tests};
    use crate::testing::*;

    const PARAMS: AdamParams = AdamParams {
        step: STEP,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        decoupled: true,
        bias_correction: true,
    };

    impl Formula<3> for AdamParams {
        fn modes(step: Step) -> Vec<Self> {
            let modes = [(true, true), (true, false), (false, true), (false, false)];
            modes
                .map(|(decoupled, bias_correction)| Self { step, decoupled, bias_correction, ..PARAMS })
                .into()
        }

        fn formula(&self, [p, m, v]: &mut [f64; 3], grad: f64) {
            let Self { step: Step { number, lr, grad_scale }, beta1, beta2, eps, weight_decay, .. } = *self;
            let (mut g, t) = (grad * grad_scale, number as i32);
            if self.decoupled {
                *p -= lr * weight_decay * *p;
            } else {
                g += weight_decay * *p;
            }
            *m = beta1 * *m + (1.0 - beta1) * g;
            *v = beta2 * *v + (1.0 - beta2) * g * g;
            let (m, v) = match self.bias_correction {
                true => (*m / (1.0 - beta1.powi(t)), *v / (1.0 - beta2.powi(t))),
                false => (*m, *v),
            };
            *p -= lr * m / (v.sqrt() + eps);
        }
    }

    rule_tests!(AdamParams, 3);

    #[test]
    fn the_first_corrected_step_moves_by_the_learning_rate_after_decay() {
        on_every_target(|_| {
            // m/(1−β₁) = g and √(v/(1−β₂)) = |g|, so the update is lr · sign(g).
            let (param, grad) = (tensor(&[2.0, 2.0], &[2]), tensor(&[3.0, -3.0], &[2]));
            let state = [(); 2].map(|()| tensor(&[0.0; 2], &[2]));
            PARAMS.apply(&param, &grad, &state).unwrap();
            let decayed = 2.0 * (1.0 - 1e-2 * 0.1);
            assert_close("param", &read(&param), &[decayed - 1e-2, decayed + 1e-2], 1e-7);
            assert_close("exp_avg", &read(&state[0]), &[0.15, -0.15], 1e-7);
            assert_close("exp_avg_sq", &read(&state[1]), &[0.1125, 0.1125], 1e-7);
        });
    }

    #[test]
    fn a_small_decay_keeps_its_strength() {
        on_every_target(|_| {
            // 1 − 1e-6 in f32 is off by 1 % of the 1e-6, so the decay must not go through that difference.
            let params = AdamParams { step: Step { lr: 1e-5, ..STEP }, ..PARAMS };
            let initial: Vec<f32> = (0..4096).map(|i| 1.0 + i as f32 / 4096.0).collect();
            let (param, zeros) = (tensor(&initial, &[4096]), || tensor(&[0.0; 4096], &[4096]));
            params.apply(&param, &zeros(), &[zeros(), zeros()]).unwrap();
            let sum = |values: &[f32]| values.iter().map(|v| f64::from(*v)).sum::<f64>();
            let decay = 1.0 - sum(&read(&param)) / sum(&initial);
            assert!((decay / 1e-6 - 1.0).abs() < 3e-3, "{decay:e}");
        });
    }

    #[test]
    fn zero_gradients_leave_parameters_without_decay_alone() {
        on_every_target(|_| {
            let params = AdamParams { weight_decay: 0.0, ..PARAMS };
            let initial = random(1, 40);
            let (param, zeros) = (tensor(&initial, &[40]), || tensor(&[0.0; 40], &[40]));
            params.apply(&param, &zeros(), &[zeros(), zeros()]).unwrap();
            assert_eq!(read(&param), initial);
        });
    }

    #[test]
    fn wrong_arguments_are_named() {
        let zeros = || tensor(&[0.0; 4], &[4]);
        let error = |params: AdamParams| {
            params.apply(&zeros(), &zeros(), &[zeros(), zeros()]).unwrap_err().to_string()
        };
        let zeroth = AdamParams { step: Step { number: 0, ..STEP }, ..PARAMS };
        assert_eq!(error(zeroth), "adamw::step: `step` is 0, expected at least 1");
        let beta2 = AdamParams { beta2: 1.0, ..PARAMS };
        assert_eq!(error(beta2), "adamw::step: `beta2` is 1, expected at least 0 and below 1");
        let error = PARAMS.apply(&zeros(), &zeros(), &[zeros()]).unwrap_err();
        assert_eq!(error.to_string(), "adamw::step: `state` is 1, expected one tensor of each kind");
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn optimizer_state_of_16_bits_is_refused_on_a_gpu() {
        on_a_gpu(|| {
            let zeros = || tensor(&[0.0; 4], &[4]);
            let narrow = zeros().to_dtype(candle_core::DType::BF16).unwrap();
            let error = PARAMS.apply(&zeros(), &zeros(), &[narrow, zeros()]).unwrap_err();
            assert!(matches!(error, OpError::MixedDTypes { argument: "exp_avg", .. }), "{error}");
        });
    }
}
