//! Stochastic gradient descent.

use super::rule::{Optimizer, Rule, Shared, Step};
use super::{LR, WEIGHT_DECAY};
use crate::config_file::define::keys;
use crate::config_file::define::words::{below_1, flag};
use crate::config_file::reader::Section;
use ulysses_kernels::optimizer::sgd::SgdParams;

keys! {
    /// Stochastic gradient descent.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Sgd {
        /// Learning rate; a scheduler may replace it.
        pub lr: f64 = LR,
        /// Momentum; 0 needs no momentum buffer.
        pub momentum: f64 = below_1().number(0.0),
        /// Nesterov momentum.
        pub nesterov: bool = flag(),
        /// Decay of the weights.
        pub weight_decay: f64 = WEIGHT_DECAY,
    }
}

impl Optimizer for Sgd {
    fn shared(&mut self) -> Shared<'_> {
        Shared { lr: self.lr, betas: None, weight_decay: &mut self.weight_decay }
    }

    fn check(&self, _name: Option<&str>, params: &Section<'_>) {
        if self.nesterov && self.momentum == 0.0 {
            params.contradiction("nesterov", "false, or a `momentum` above 0");
        }
    }

    fn state_kinds(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum"] }
    }

    fn rule(&self, step: Step) -> Rule {
        let Self { momentum, nesterov, weight_decay, .. } = *self;
        Rule::Element(Box::new(SgdParams { step, momentum, nesterov, weight_decay }))
    }
}
