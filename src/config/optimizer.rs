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
        /// Default 0 for `Adam` (DeepSpeed's), 0.01 for `AdamW` (PyTorch's).
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
}

#[derive(Clone, Copy)]
enum Type {
    Adam,
    AdamW,
    Sgd,
}

const TYPES: &[(&str, Type)] = &[("Adam", Type::Adam), ("AdamW", Type::AdamW), ("SGD", Type::Sgd)];

const DEFAULT_LR: f64 = 1e-3;

impl Default for OptimizerConfig {
    /// AdamW with its defaults.
    fn default() -> Self {
        Self::Adam {
            lr: DEFAULT_LR,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.01,
            adam_w_mode: true,
            bias_correction: true,
        }
    }
}

impl OptimizerConfig {
    /// The learning rate without a scheduler.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Adam { lr, .. } | Self::Sgd { lr, .. } => *lr,
        }
    }

    /// Reads the section; an absent one is AdamW with its defaults.
    pub(super) fn read(section: &mut Section<'_>, notes: &mut Vec<String>) -> Self {
        if !section.is_present() {
            notes.push("no `optimizer` is given: AdamW with its defaults, lr 0.001".to_owned());
            return Self::default();
        }
        let Some(optimizer_type) = section.required_choice("type", TYPES) else {
            section.skip("params"); // which keys it may have depends on the type
            return Self::default();
        };
        section.section("params", |params| match optimizer_type {
            Type::Adam => read_adam(params, false, notes),
            Type::AdamW => read_adam(params, true, notes),
            Type::Sgd => read_sgd(params),
        })
    }
}

fn read_adam(params: &mut Section<'_>, is_adam_w: bool, notes: &mut Vec<String>) -> OptimizerConfig {
    if params.boolean("torch_adam").is_some() {
        notes.push("`optimizer.params.torch_adam` has no effect: there is one Adam here".to_owned());
    }
    let adam_w_mode = params.boolean("adam_w_mode").unwrap_or(true);
    if is_adam_w && !adam_w_mode {
        params.contradiction(
            "adam_w_mode",
            "true, as the type is \"AdamW\" (with the type \"Adam\" it may be false)",
        );
    }
    OptimizerConfig::Adam {
        lr: params.number("lr", 0.0..).unwrap_or(DEFAULT_LR),
        betas: params.number_pair("betas", 0.0..1.0).unwrap_or([0.9, 0.999]),
        eps: params.number("eps", f64::from(f32::MIN_POSITIVE)..).unwrap_or(1e-8),
        weight_decay: params.number("weight_decay", 0.0..).unwrap_or(if is_adam_w { 0.01 } else { 0.0 }),
        adam_w_mode,
        bias_correction: params.boolean("bias_correction").unwrap_or(true),
    }
}

fn read_sgd(params: &mut Section<'_>) -> OptimizerConfig {
    let momentum = params.number("momentum", 0.0..1.0).unwrap_or(0.0);
    let nesterov = params.boolean("nesterov").unwrap_or(false);
    if nesterov && momentum == 0.0 {
        params.contradiction("nesterov", "false, or a `momentum` above 0 beside it");
    }
    OptimizerConfig::Sgd {
        lr: params.number("lr", 0.0..).unwrap_or(DEFAULT_LR),
        momentum,
        nesterov,
        weight_decay: params.number("weight_decay", 0.0..).unwrap_or(0.0),
    }
}
