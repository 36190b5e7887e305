//! Lion.

use super::rule::{Optimizer, Rule, Shared, Step};
use super::{BETAS, LR, WEIGHT_DECAY};
use crate::config_file::define::keys;
use ulysses_kernels::optimizer::lion::LionParams;

keys! {
    /// Lion: steps of equal size in the direction of the momentum's sign. (The paper's betas are 0.9 and 0.99.)
    #[derive(Clone, Debug, PartialEq)]
    pub struct Lion {
        /// Learning rate; a scheduler may replace it.
        pub lr: f64 = LR,
        /// Weight of the momentum in the update direction, and decay rate of the momentum.
        pub betas: [f64; 2] = BETAS,
        /// Decay of the weights.
        pub weight_decay: f64 = WEIGHT_DECAY,
    }
}

impl Optimizer for Lion {
    fn shared(&mut self) -> Shared<'_> {
        Shared { lr: self.lr, betas: Some(&mut self.betas), weight_decay: &mut self.weight_decay }
    }

    fn state_kinds(&self) -> &'static [&'static str] {
        &["exp_avg"]
    }

    fn rule(&self, step: Step) -> Rule {
        let Self { betas: [beta1, beta2], weight_decay, .. } = *self;
        Rule::Element(Box::new(LionParams { step, beta1, beta2, weight_decay }))
    }
}
