//! The `optimizer` section.

use crate::config::define::words::{at_least, below_1, flag, number, two_below_1};
use crate::config::define::{Keys, declare_variants, keys, variants, write_variant};
use crate::config::reader::{Report, Section};
use crate::config::vocabulary::{Key, Literal};
use serde_json::{Map, Value as Json};
use std::sync::LazyLock;

const LR: Key = number().number(1e-3).auto(Literal::Number(5e-5));

const BETAS: Key = two_below_1().two_numbers([0.9, 0.999]).auto(Literal::TwoNumbers([0.9, 0.999]));

/// Above 0, because the zero gradients of padding must not become NaN.
const EPS: Key = at_least(f32::MIN_POSITIVE as f64).number(1e-8).auto(Literal::Number(1e-8));

/// 0, as in DeepSpeed, for `AdamW` too (PyTorch's AdamW has 0.01).
const WEIGHT_DECAY: Key = number().number(0.0).auto(Literal::Number(0.0));

variants! {
    /// The optimizer and its parameters, in DeepSpeed's vocabulary.
    #[derive(Clone, Debug, PartialEq)]
    #[non_exhaustive]
    pub enum OptimizerConfig {
        /// Adam or AdamW. Both are DeepSpeed's `FusedAdam`: `Adam` decays weights like AdamW unless `adam_w_mode` is false.
        Adam: "Adam", "AdamW" {
            /// Learning rate; a scheduler may replace it.
            lr: f64 = LR,
            /// Decay rates of the two moments.
            betas: [f64; 2] = BETAS,
            /// Added to the root of the second moment.
            eps: f64 = EPS,
            /// Decay of the weights.
            weight_decay: f64 = WEIGHT_DECAY,
            /// Decoupled weight decay (AdamW) instead of L2 regularization of the gradients.
            adam_w_mode: bool = flag().boolean(true),
            /// Divides the moments by 1 − betaᵗ.
            bias_correction: bool = flag().boolean(true),
        }
        /// Stochastic gradient descent.
        Sgd: "SGD" {
            /// Learning rate; a scheduler may replace it.
            lr: f64 = LR,
            /// Momentum; 0 needs no momentum buffer.
            momentum: f64 = below_1().number(0.0),
            /// Nesterov momentum.
            nesterov: bool = flag(),
            /// Decay of the weights.
            weight_decay: f64 = WEIGHT_DECAY,
        }
        /// Lion: steps of equal size in the direction of the momentum's sign. (The paper's betas are 0.9 and 0.99.)
        Lion: "Lion" {
            /// Learning rate; a scheduler may replace it.
            lr: f64 = LR,
            /// Weight of the momentum in the update direction, and decay rate of the momentum.
            betas: [f64; 2] = BETAS,
            /// Decay of the weights.
            weight_decay: f64 = WEIGHT_DECAY,
        }
        /// Adagrad in PyTorch's form, with its defaults: steps shrink with the accumulated squared gradients.
        Adagrad: "Adagrad" {
            /// Learning rate; a scheduler may replace it.
            lr: f64 = LR.number(1e-2),
            /// Divides the learning rate of step t by 1 + (t − 1) · `lr_decay`.
            lr_decay: f64 = number().number(0.0),
            /// Added to the root of the second moment.
            eps: f64 = EPS.number(1e-10),
            /// Decay of the weights.
            weight_decay: f64 = WEIGHT_DECAY,
            /// Initial value of the accumulated squared gradients.
            initial_accumulator_value: f64 = number().number(0.0),
        }
        /// LAMB: Adam's direction, with a step size proportional to the norm of each parameter tensor.
        Lamb: "Lamb" {
            /// Learning rate; a scheduler may replace it.
            lr: f64 = LR,
            /// Decay rates of the two moments.
            betas: [f64; 2] = BETAS,
            /// Added to the root of the second moment.
            eps: f64 = EPS,
            /// Decay of the weights.
            weight_decay: f64 = WEIGHT_DECAY,
            /// Multiplies the step by √(1 − beta₂ᵗ) / (1 − beta₁ᵗ); the trust ratio uses uncorrected moments.
            bias_correction: bool = flag().boolean(true),
            /// Lower bound of a tensor's trust ratio, ‖parameter‖ / ‖direction‖.
            min_coeff: f64 = number().number(0.01),
            /// Upper bound of the trust ratio.
            max_coeff: f64 = number().number(10.0),
        }
    }
}

impl Keys for OptimizerConfig {
    fn declare(path: &str) -> Vec<Key> {
        declare_variants(path, "The update rule.", Self::variants(path))
    }

    /// Reads the section; an absent one is AdamW with its defaults.
    fn from_section(section: &Section<'_>) -> Self {
        let of_type = |name| Self::of_type(name, &section.section("params"));
        section.variant().map_or_else(Self::default, of_type)
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
        static DEFAULT: LazyLock<OptimizerConfig> = LazyLock::new(|| {
            let adam = OptimizerConfig::variants("").remove(0);
            OptimizerConfig::of_type(adam.name, &Section::absent(&Report::new("", &[]), adam.params))
        });
        DEFAULT.clone()
    }
}

impl OptimizerConfig {
    /// Returns the learning rate without a scheduler.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Adam { lr, .. }
            | Self::Sgd { lr, .. }
            | Self::Lion { lr, .. }
            | Self::Adagrad { lr, .. }
            | Self::Lamb { lr, .. } => *lr,
        }
    }

    /// Returns the optimizer with other betas, if it has betas.
    #[must_use]
    pub fn with_betas(mut self, new: [f64; 2]) -> Self {
        match &mut self {
            Self::Adam { betas, .. } | Self::Lion { betas, .. } | Self::Lamb { betas, .. } => *betas = new,
            Self::Sgd { .. } | Self::Adagrad { .. } => {}
        }
        self
    }

    /// Returns the optimizer with another weight decay.
    #[must_use]
    pub fn with_weight_decay(mut self, new: f64) -> Self {
        match &mut self {
            Self::Adam { weight_decay, .. }
            | Self::Sgd { weight_decay, .. }
            | Self::Lion { weight_decay, .. }
            | Self::Adagrad { weight_decay, .. }
            | Self::Lamb { weight_decay, .. } => *weight_decay = new,
        }
        self
    }

    pub(crate) fn check(&self, section: &Section<'_>) {
        if !section.is_present() {
            let note = "`optimizer` is not set: AdamW with lr 0.001 and weight decay 0 is used";
            return section.warn(note.to_owned());
        }
        let params = section.section("params");
        match *self {
            Self::Adam { adam_w_mode: false, .. } if section.variant() == Some("AdamW") => {
                let expected = "true, as the type is \"AdamW\" (with the type \"Adam\" it may be false)";
                params.contradiction("adam_w_mode", expected);
            }
            Self::Sgd { momentum: 0.0, nesterov: true, .. } => {
                params.contradiction("nesterov", "false, or a `momentum` above 0");
            }
            Self::Lamb { min_coeff, max_coeff, .. } if min_coeff > max_coeff => {
                let given = if params.names("min_coeff") { "min_coeff" } else { "max_coeff" };
                params.contradiction(given, &format!("`min_coeff` {min_coeff} ≤ `max_coeff` {max_coeff}"));
            }
            _ => {}
        }
    }
}
