//! The `optimizer` section.

use super::reader::Section;
use serde::Serialize;

/// The optimizer and its parameters, in DeepSpeed's vocabulary.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", content = "params")]
#[non_exhaustive]
pub enum OptimizerConfig {
    /// Adam or AdamW: the type `AdamW` is Adam with `adam_w_mode`.
    Adam {
        /// Learning rate; default 1e-3. A scheduler may replace it.
        lr: f64,
        /// Decay rates of the two moments; default `[0.9, 0.999]`.
        betas: [f64; 2],
        /// Added to the root of the second moment; default 1e-8. Above 0, so that the
        /// zero gradients of padding do not become NaN.
        eps: f64,
        /// Default 0, as in DeepSpeed for `AdamW` too (PyTorch's AdamW has 0.01).
        weight_decay: f64,
        /// Decays the weights themselves (AdamW) rather than the gradients (L2); default
        /// true, as in DeepSpeed, even for the type `Adam`.
        adam_w_mode: bool,
        /// Divides the moments by `1 − betaᵗ`; default true.
        bias_correction: bool,
    },
    /// Stochastic gradient descent.
    #[serde(rename = "SGD")]
    Sgd {
        /// Learning rate; default 1e-3. A scheduler may replace it.
        lr: f64,
        /// Default 0: no momentum buffer.
        momentum: f64,
        /// Nesterov's momentum; default false.
        nesterov: bool,
        /// L2 penalty; default 0.
        weight_decay: f64,
    },
    /// Lion: steps of equal length in the direction of the momentum's sign.
    Lion {
        /// Learning rate; default 1e-3. A scheduler may replace it.
        lr: f64,
        /// Weight of the momentum in the direction of a step, and its decay rate; default
        /// `[0.9, 0.999]`, as in DeepSpeed (the paper has `[0.9, 0.99]`).
        betas: [f64; 2],
        /// Decay of the weights themselves; default 0.
        weight_decay: f64,
    },
    /// Adagrad in PyTorch's form: steps shrink with the sum of all squared gradients.
    Adagrad {
        /// Learning rate; default 1e-2 (PyTorch's). A scheduler may replace it.
        lr: f64,
        /// Divides the rate of step t by `1 + (t − 1) · lr_decay`; default 0.
        lr_decay: f64,
        /// Added to the root of the sum; default 1e-10. Above 0, so that the zero gradients of
        /// parameters without a part in a batch do not become NaN.
        eps: f64,
        /// L2 penalty; default 0.
        weight_decay: f64,
        /// What the sum starts from; default 0.
        initial_accumulator_value: f64,
    },
    /// LAMB: Adam's direction, with a step for each parameter tensor in proportion to its norm.
    Lamb {
        /// Learning rate; default 1e-3. A scheduler may replace it.
        lr: f64,
        /// Decay rates of the two moments; default `[0.9, 0.999]`.
        betas: [f64; 2],
        /// Added to the root of the second moment; default 1e-8, above 0 as Adam's.
        eps: f64,
        /// Part of the direction, and so of its norm; default 0.
        weight_decay: f64,
        /// Multiplies the step by `√(1 − beta₂ᵗ) / (1 − beta₁ᵗ)`, as DeepSpeed does: the trust ratio is that of
        /// the moments without correction; default true.
        bias_correction: bool,
        /// Lower bound of the trust ratio ‖parameter‖ / ‖direction‖; default 0.01.
        min_coeff: f64,
        /// Upper bound of the trust ratio; default 10.
        max_coeff: f64,
    },
}

#[derive(Clone, Copy)]
enum Type {
    Adam,
    Sgd,
    Lion,
    Adagrad,
    Lamb,
}

const TYPES: &[(&str, Type)] = &[
    ("Adam", Type::Adam),
    ("AdamW", Type::Adam),
    ("SGD", Type::Sgd),
    ("Lion", Type::Lion),
    ("Adagrad", Type::Adagrad),
    ("Lamb", Type::Lamb),
];

impl Default for OptimizerConfig {
    /// AdamW with its defaults.
    fn default() -> Self {
        Self::Adam {
            lr: 1e-3,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            adam_w_mode: true,
            bias_correction: true,
        }
    }
}

impl OptimizerConfig {
    /// The learning rate without a scheduler.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Adam { lr, .. }
            | Self::Sgd { lr, .. }
            | Self::Lion { lr, .. }
            | Self::Adagrad { lr, .. }
            | Self::Lamb { lr, .. } => *lr,
        }
    }

    /// The same optimizer with other betas, where it has betas.
    #[must_use]
    pub fn with_betas(mut self, new: [f64; 2]) -> Self {
        match &mut self {
            Self::Adam { betas, .. } | Self::Lion { betas, .. } | Self::Lamb { betas, .. } => *betas = new,
            Self::Sgd { .. } | Self::Adagrad { .. } => {}
        }
        self
    }

    /// The same optimizer with another weight decay.
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

    /// Reads the section; an absent one is AdamW with its defaults.
    pub(super) fn read(section: &Section<'_>) -> Self {
        if !section.is_present() {
            section.warn(
                "no `optimizer` is given: AdamW with its defaults, lr 0.001 and no weight decay".to_owned(),
            );
            return Self::default();
        }
        let params = section.section("params");
        match section.choice("type", TYPES) {
            Some(Type::Adam) => read_adam(&params, section.choice("type", &[("AdamW", ())]).is_some()),
            Some(Type::Sgd) => read_sgd(&params),
            Some(Type::Lion) => read_lion(&params),
            Some(Type::Adagrad) => read_adagrad(&params),
            Some(Type::Lamb) => read_lamb(&params),
            None => Self::default(), // reported
        }
    }
}

fn read_adam(params: &Section<'_>, is_adam_w: bool) -> OptimizerConfig {
    let adam_w_mode = params.boolean("adam_w_mode");
    if is_adam_w && !adam_w_mode {
        let expected = "true, as the type is \"AdamW\" (with the type \"Adam\" it may be false)";
        params.contradiction("adam_w_mode", expected);
    }
    OptimizerConfig::Adam {
        lr: params.number("lr").unwrap_or_default(),
        betas: params.two_numbers("betas").unwrap_or_default(),
        eps: params.number("eps").unwrap_or_default(),
        weight_decay: params.number("weight_decay").unwrap_or_default(),
        adam_w_mode,
        bias_correction: params.boolean("bias_correction"),
    }
}

fn read_sgd(params: &Section<'_>) -> OptimizerConfig {
    let momentum = params.number("momentum").unwrap_or_default();
    let nesterov = params.boolean("nesterov");
    if nesterov && momentum == 0.0 {
        params.contradiction("nesterov", "false, or a `momentum` above 0 beside it");
    }
    OptimizerConfig::Sgd {
        lr: params.number("lr").unwrap_or_default(),
        momentum,
        nesterov,
        weight_decay: params.number("weight_decay").unwrap_or_default(),
    }
}

fn read_lion(params: &Section<'_>) -> OptimizerConfig {
    OptimizerConfig::Lion {
        lr: params.number("lr").unwrap_or_default(),
        betas: params.two_numbers("betas").unwrap_or_default(),
        weight_decay: params.number("weight_decay").unwrap_or_default(),
    }
}

fn read_adagrad(params: &Section<'_>) -> OptimizerConfig {
    OptimizerConfig::Adagrad {
        lr: params.number("lr").unwrap_or_default(),
        lr_decay: params.number("lr_decay").unwrap_or_default(),
        eps: params.number("eps").unwrap_or_default(),
        weight_decay: params.number("weight_decay").unwrap_or_default(),
        initial_accumulator_value: params.number("initial_accumulator_value").unwrap_or_default(),
    }
}

fn read_lamb(params: &Section<'_>) -> OptimizerConfig {
    let min_coeff = params.number("min_coeff").unwrap_or_default();
    let max_coeff = params.number("max_coeff").unwrap_or_default();
    if min_coeff > max_coeff {
        let given = if params.names("min_coeff") { "min_coeff" } else { "max_coeff" };
        params.contradiction(given, &format!("`min_coeff` {min_coeff} ≤ `max_coeff` {max_coeff}"));
    }
    OptimizerConfig::Lamb {
        lr: params.number("lr").unwrap_or_default(),
        betas: params.two_numbers("betas").unwrap_or_default(),
        eps: params.number("eps").unwrap_or_default(),
        weight_decay: params.number("weight_decay").unwrap_or_default(),
        bias_correction: params.boolean("bias_correction"),
        min_coeff,
        max_coeff,
    }
}
