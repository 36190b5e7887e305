//! LAMB.

use super::rule::{Optimizer, Rule, Shared, Step};
use super::{BETAS, EPS, LR, WEIGHT_DECAY};
use crate::config_file::define::keys;
use crate::config_file::define::words::{flag, number};
use crate::config_file::reader::Section;
use ulysses_kernels::optimizer::lamb::LambParams;

keys! {
    /// LAMB: Adam's direction, with a step size proportional to the norm of each parameter tensor.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Lamb {
        /// Learning rate; a scheduler may replace it.
        pub lr: f64 = LR,
        /// Decay rates of the two moments.
        pub betas: [f64; 2] = BETAS,
        /// Added to the root of the second moment.
        pub eps: f64 = EPS,
        /// Decay of the weights.
        pub weight_decay: f64 = WEIGHT_DECAY,
        /// Multiplies the step by √(1 − beta₂ᵗ) / (1 − beta₁ᵗ); the trust ratio uses uncorrected moments.
        pub bias_correction: bool = flag().boolean(true),
        /// Lower bound of a tensor's trust ratio, ‖parameter‖ / ‖direction‖.
        pub min_coeff: f64 = number().number(0.01),
        /// Upper bound of the trust ratio.
        pub max_coeff: f64 = number().number(10.0),
    }
}

impl Optimizer for Lamb {
    fn shared(&mut self) -> Shared<'_> {
        Shared { lr: self.lr, betas: Some(&mut self.betas), weight_decay: &mut self.weight_decay }
    }

    fn check(&self, _name: Option<&str>, params: &Section<'_>) {
        let Self { min_coeff, max_coeff, .. } = self;
        if min_coeff > max_coeff {
            let given = if params.names("min_coeff") { "min_coeff" } else { "max_coeff" };
            params.contradiction(given, &format!("`min_coeff` {min_coeff} ≤ `max_coeff` {max_coeff}"));
        }
    }

    fn state_kinds(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn rule(&self, step: Step) -> Rule {
        let Self { betas: [beta1, beta2], eps, weight_decay, min_coeff, max_coeff, .. } = *self;
        // DeepSpeed's FusedLamb corrects the step size instead of the moments, so trust ratio and weight decay
        // use the uncorrected moments.
        let t = step.number as f64;
        let correction =
            if self.bias_correction { (1.0 - beta2.powf(t)).sqrt() / (1.0 - beta1.powf(t)) } else { 1.0 };
        Rule::Tensor(Box::new(LambParams {
            step: Step { lr: step.lr * correction, ..step },
            beta1,
            beta2,
            eps,
            weight_decay,
            bias_correction: false,
            min_coeff,
            max_coeff,
        }))
    }
}
