//! Adam and AdamW.

use super::rule::{Optimizer, Rule, Shared, Step};
use super::{BETAS, EPS, LR, WEIGHT_DECAY};
use crate::config_file::define::keys;
use crate::config_file::define::words::flag;
use crate::config_file::reader::Section;
use ulysses_kernels::optimizer::adamw::AdamParams;

keys! {
    /// Adam or AdamW. Both are DeepSpeed's `FusedAdam`: `Adam` decays weights like AdamW unless `adam_w_mode` is false.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Adam {
        /// Learning rate; a scheduler may replace it.
        pub lr: f64 = LR,
        /// Decay rates of the two moments.
        pub betas: [f64; 2] = BETAS,
        /// Added to the root of the second moment.
        pub eps: f64 = EPS,
        /// Decay of the weights.
        pub weight_decay: f64 = WEIGHT_DECAY,
        /// Decoupled weight decay (AdamW) instead of L2 regularization of the gradients.
        pub adam_w_mode: bool = flag().boolean(true),
        /// Divides the moments by 1 − betaᵗ.
        pub bias_correction: bool = flag().boolean(true),
    }
}

impl Optimizer for Adam {
    fn shared(&mut self) -> Shared<'_> {
        Shared { lr: self.lr, betas: Some(&mut self.betas), weight_decay: &mut self.weight_decay }
    }

    fn check(&self, name: Option<&str>, params: &Section<'_>) {
        if !self.adam_w_mode && name == Some("AdamW") {
            let expected = "true, as the type is \"AdamW\" (with the type \"Adam\" it may be false)";
            params.contradiction("adam_w_mode", expected);
        }
    }

    fn state_kinds(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn rule(&self, step: Step) -> Rule {
        let Self {
            betas: [beta1, beta2], eps, weight_decay, adam_w_mode: decoupled, bias_correction, ..
        } = *self;
        Rule::Element(Box::new(AdamParams {
            step,
            beta1,
            beta2,
            eps,
            weight_decay,
            decoupled,
            bias_correction,
        }))
    }
}
