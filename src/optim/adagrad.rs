//! Adagrad.

use super::rule::{Optimizer, Rule, Shared, Step};
use super::{EPS, LR, WEIGHT_DECAY};
use crate::config_file::define::keys;
use crate::config_file::define::words::number;
use ulysses_kernels::optimizer::adagrad::AdagradParams;

keys! {
    /// Adagrad in PyTorch's form, with its defaults: steps shrink with the accumulated squared gradients.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Adagrad {
        /// Learning rate; a scheduler may replace it.
        pub lr: f64 = LR.number(1e-2),
        /// Divides the learning rate of step t by 1 + (t − 1) · `lr_decay`.
        pub lr_decay: f64 = number().number(0.0),
        /// Added to the root of the second moment.
        pub eps: f64 = EPS.number(1e-10),
        /// Decay of the weights.
        pub weight_decay: f64 = WEIGHT_DECAY,
        /// Initial value of the accumulated squared gradients.
        pub initial_accumulator_value: f64 = number().number(0.0),
    }
}

impl Optimizer for Adagrad {
    fn shared(&mut self) -> Shared<'_> {
        Shared { lr: self.lr, betas: None, weight_decay: &mut self.weight_decay }
    }

    fn state_kinds(&self) -> &'static [&'static str] {
        &["sum"]
    }

    fn initial_state(&self) -> f64 {
        self.initial_accumulator_value
    }

    fn rule(&self, step: Step) -> Rule {
        let Self { lr_decay, eps, weight_decay, .. } = *self;
        Rule::Element(Box::new(AdagradParams { step, lr_decay, eps, weight_decay }))
    }
}
