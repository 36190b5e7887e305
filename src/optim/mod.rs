//! Optimizers. Each has a file with its keys in the config and its update, and a line in the registry below.

mod adagrad;
mod adam;
mod lamb;
mod lion;
mod rule;
mod sgd;
#[cfg(test)]
mod tests;

pub use adagrad::Adagrad;
pub use adam::Adam;
pub use lamb::Lamb;
pub use lion::Lion;
pub(crate) use rule::{Optimizer, Rule, Step};
pub use sgd::Sgd;

use crate::config_file::define::words::{at_least, number, two_below_1};
use crate::config_file::define::{Keys, declare_variants, variants, write_variant};
use crate::config_file::reader::{Report, Section};
use crate::config_file::vocabulary::{Key, Literal};
use serde_json::{Map, Value as Json};
use std::sync::LazyLock;

variants! {
    /// The optimizer and its parameters, in DeepSpeed's vocabulary.
    #[derive(Clone, Debug, PartialEq)]
    #[non_exhaustive]
    pub enum OptimizerConfig: Optimizer {
        /// Adam or AdamW.
        Adam(Adam) = "Adam" | "AdamW",
        /// Stochastic gradient descent.
        Sgd(Sgd) = "SGD",
        /// Steps of equal size, by the sign of the momentum.
        Lion(Lion) = "Lion",
        /// Steps that shrink with the accumulated squared gradients.
        Adagrad(Adagrad) = "Adagrad",
        /// Steps proportional to the norm of each parameter tensor.
        Lamb(Lamb) = "Lamb",
    }
}

// Keys of several optimizers.

const LR: Key = number().number(1e-3).auto(Literal::Number(5e-5));

const BETAS: Key = two_below_1().two_numbers([0.9, 0.999]).auto(Literal::TwoNumbers([0.9, 0.999]));

/// Above 0, because the zero gradients of padding must not become NaN.
const EPS: Key = at_least(f32::MIN_POSITIVE as f64).number(1e-8).auto(Literal::Number(1e-8));

/// 0, as in DeepSpeed, for `AdamW` too (PyTorch's AdamW has 0.01).
const WEIGHT_DECAY: Key = number().number(0.0).auto(Literal::Number(0.0));

impl Keys for OptimizerConfig {
    fn declare(path: &str) -> Vec<Key> {
        declare_variants(path, "The update rule.", Self::variants(path))
    }

    /// Reads the section; an absent one is AdamW with its defaults.
    fn from_section(section: &Section<'_>) -> Self {
        let named = section.variant().and_then(|name| Self::of_type(name, &section.section("params")));
        // The error of another type has been reported.
        named.unwrap_or_default()
    }

    fn write_into(&self, object: &mut Map<String, Json>) {
        let (name, params) = self.name_and_params();
        write_variant(object, name, params);
    }
}

impl Default for OptimizerConfig {
    /// Returns AdamW with its defaults.
    fn default() -> Self {
        // A declaration leaks its keys.
        static DEFAULT: LazyLock<Adam> = LazyLock::new(|| {
            let adam = OptimizerConfig::variants("").remove(0);
            Adam::from_section(&Section::absent(&Report::new("", &[]), adam.params))
        });
        Self::Adam(DEFAULT.clone())
    }
}

impl OptimizerConfig {
    /// Returns the learning rate without a scheduler.
    pub fn lr(&self) -> f64 {
        self.clone().params_mut().shared().lr
    }

    /// Returns the optimizer with other betas, if it has betas.
    #[must_use]
    pub fn with_betas(mut self, new: [f64; 2]) -> Self {
        if let Some(betas) = self.params_mut().shared().betas {
            *betas = new;
        }
        self
    }

    /// Returns the optimizer with another weight decay.
    #[must_use]
    pub fn with_weight_decay(mut self, new: f64) -> Self {
        *self.params_mut().shared().weight_decay = new;
        self
    }

    /// Returns the name in a config file, if the optimizer has no betas.
    pub(crate) fn name_without_betas(&self) -> Option<&'static str> {
        let has_betas = self.clone().params_mut().shared().betas.is_some();
        (!has_betas).then(|| self.name_and_params().0)
    }

    /// The names in a config file of all optimizers.
    #[cfg(test)]
    pub(crate) fn names() -> Vec<&'static str> {
        Self::variants("").iter().map(|variant| variant.name).collect()
    }

    /// Returns whether a step updates elements independently of each other.
    pub(crate) fn is_by_element(&self) -> bool {
        let first = Step { number: 1, lr: self.lr(), grad_scale: 1.0 };
        matches!(self.params().rule(first), Rule::Element(_))
    }

    pub(crate) fn check(&self, section: &Section<'_>) {
        if !section.is_present() {
            let note = "`optimizer` is not set: AdamW with lr 0.001 and weight decay 0 is used";
            return section.warn(note.to_owned());
        }
        self.params().check(section.variant(), &section.section("params"));
    }
}
