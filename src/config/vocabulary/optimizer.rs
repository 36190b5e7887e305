//! The `optimizer` section.

use super::build::{BELOW_1, NOT_NEGATIVE, at_least, flag, key, refused, variant};
use super::key::{Key, Literal, Refused, Value, Variant};

pub(super) const OPTIMIZER: &[Key] = &[
    key("type", Value::Variant { variants: OPTIMIZERS, refused: REFUSED }, "The update rule.").required(),
    key("params", Value::Params(OPTIMIZERS), "Its parameters."),
    flag("legacy_fusion", "Uses an older fused LAMB.").no_effect("there is one LAMB here"),
];

/// DeepSpeed's `Adam` decays weights like AdamW unless `adam_w_mode` is false.
const OPTIMIZERS: &[Variant] = &[
    variant("Adam", ADAM),
    variant("AdamW", ADAM),
    variant("SGD", SGD),
    variant("Lion", LION),
    variant("Adagrad", ADAGRAD),
    variant("Lamb", LAMB),
];

const USE_ADAM_W: &str = "this version has Adam, AdamW, SGD, Lion, Adagrad and LAMB: use \"AdamW\"";
const COMPRESSED: &str =
    "its compressed communication changes the updates and is not implemented: use \"Adam\"";

const REFUSED: &[Refused] = &[
    refused("Adafactor", USE_ADAM_W),
    refused("adamw_torch", "the optimizer is called \"AdamW\" here"),
    refused("adamw_torch_fused", "the optimizer is called \"AdamW\" here"),
    refused("OneBitAdam", COMPRESSED),
    refused("ZeroOneAdam", COMPRESSED),
    refused(
        "OneBitLamb",
        "its compressed communication changes the updates and is not implemented: use \"Lamb\"",
    ),
    refused("MuAdam", "it scales rates by the width of layers, which is not implemented: use \"Adam\""),
    refused("MuAdamW", "it scales rates by the width of layers, which is not implemented: use \"AdamW\""),
    refused("MuSGD", "it scales rates by the width of layers, which is not implemented: use \"SGD\""),
    refused("Muon", "its orthogonalised updates are not implemented: use \"AdamW\""),
    refused("FusedAdam", "the class is what \"Adam\" stands for: use \"Adam\""),
    refused("DeepSpeedCPUAdam", "the class is what \"Adam\" with offload stands for: use \"Adam\""),
    refused("FusedLamb", "the class is what \"Lamb\" stands for: use \"Lamb\""),
    refused("FusedLion", "the class is what \"Lion\" stands for: use \"Lion\""),
    refused("DeepSpeedCPULion", "the class is what \"Lion\" with offload stands for: use \"Lion\""),
    refused("DeepSpeedCPUAdagrad", "the class is what \"Adagrad\" with offload stands for: use \"Adagrad\""),
    refused("Adadelta", USE_ADAM_W),
    refused("Adamax", USE_ADAM_W),
    refused("ASGD", USE_ADAM_W),
    refused("LBFGS", USE_ADAM_W),
    refused("NAdam", USE_ADAM_W),
    refused("RAdam", USE_ADAM_W),
    refused("RMSprop", USE_ADAM_W),
    refused("Rprop", USE_ADAM_W),
    refused("SparseAdam", USE_ADAM_W),
];

const LR: Key = key("lr", NOT_NEGATIVE, "Learning rate; a scheduler may replace it.")
    .number(1e-3)
    .auto(Literal::Number(5e-5));

const BETAS: Key = key("betas", Value::TwoNumbers(BELOW_1), "Decay rates of the two moments.")
    .default(Literal::TwoNumbers([0.9, 0.999]))
    .auto(Literal::TwoNumbers([0.9, 0.999]));

/// Above 0, so that the zero gradients of padding do not become NaN.
const EPS: Key = key("eps", at_least(f32::MIN_POSITIVE as f64), "Added to the root of the second moment.")
    .number(1e-8)
    .auto(Literal::Number(1e-8));

const WEIGHT_DECAY: Key =
    key("weight_decay", NOT_NEGATIVE, "Decay of the weights.").auto(Literal::Number(0.0));

const ADAM_W_MODE: Key =
    flag("adam_w_mode", "Decays the weights themselves (AdamW) rather than the gradients (L2).")
        .boolean(true);

const BIAS_CORRECTION: Key = flag("bias_correction", "Divides the moments by 1 − betaᵗ.").boolean(true);

const TORCH_ADAM: Key = flag("torch_adam", "Uses PyTorch's Adam.").no_effect("there is one Adam here");

const AMSGRAD: Key =
    flag("amsgrad", "Keeps the largest second moment.").only_off("AMSGrad is not implemented: leave it out");

const MAXIMIZE: Key = flag("maximize", "Climbs instead of descending.")
    .only_off("the loss is always minimised: change the sign of the loss");

const MAX_GRAD_NORM: Key =
    key("max_grad_norm", NOT_NEGATIVE, "Clips gradients, in some of DeepSpeed's wrappers.").number(0.0).only(
        &[Literal::Integer(0), Literal::Number(0.0)],
        "clipping belongs to the top of the file: write `gradient_clipping` there",
    );

const FP32_STATES: Key = flag("fp32_optimizer_states", "Keeps the optimizer's state in f32.")
    .boolean(true)
    .only(&[Literal::Boolean(true)], "the state is f32: leave it out");

const KERNEL_CHOICE: &str = "it chooses between kernels of PyTorch";
const FUSED: Key = flag("fused", "Uses PyTorch's fused kernel.").no_effect(KERNEL_CHOICE);
const FOREACH: Key = flag("foreach", "Uses PyTorch's multi-tensor kernel.").no_effect(KERNEL_CHOICE);
const CAPTURABLE: Key = flag("capturable", "May be captured in a CUDA graph.").no_effect(KERNEL_CHOICE);
const DIFFERENTIABLE: Key = flag("differentiable", "Lets gradients pass through the update.")
    .no_effect("nothing differentiates an update");
const SET_GRAD_NONE: Key = flag("set_grad_none", "Frees gradients rather than zeroing them.")
    .boolean(true)
    .no_effect("gradients are buffers that are reused");

/// The keys of Adam and of AdamW, which DeepSpeed makes the same `FusedAdam`, with its defaults.
const ADAM: &[Key] = &[
    LR,
    BETAS,
    EPS,
    WEIGHT_DECAY.number(0.0),
    ADAM_W_MODE,
    BIAS_CORRECTION,
    TORCH_ADAM,
    AMSGRAD,
    MAXIMIZE,
    MAX_GRAD_NORM,
    FP32_STATES,
    FUSED,
    FOREACH,
    CAPTURABLE,
    DIFFERENTIABLE,
    SET_GRAD_NONE,
];

const SGD: &[Key] = &[
    LR,
    key("momentum", Value::Number(BELOW_1), "Decay rate of the momentum; 0 for no buffer.").number(0.0),
    flag("nesterov", "Nesterov's momentum."),
    WEIGHT_DECAY.number(0.0),
    key("dampening", NOT_NEGATIVE, "Weakens the gradient in the momentum.")
        .number(0.0)
        .only(&[Literal::Integer(0), Literal::Number(0.0)], "dampening is not implemented: leave it out"),
    MAXIMIZE,
    MAX_GRAD_NORM,
    FUSED,
    FOREACH,
    DIFFERENTIABLE,
];

const LION: &[Key] = &[
    LR,
    key(
        "betas",
        Value::TwoNumbers(BELOW_1),
        "Weight of the momentum in the direction of a step, and its decay rate.",
    )
    .default(Literal::TwoNumbers([0.9, 0.999]))
    .auto(Literal::TwoNumbers([0.9, 0.999])),
    WEIGHT_DECAY.number(0.0),
    MAX_GRAD_NORM,
    FP32_STATES,
    SET_GRAD_NONE,
];

const ADAGRAD: &[Key] = &[
    LR.number(1e-2),
    key("lr_decay", NOT_NEGATIVE, "Divides the rate of step t by 1 + (t − 1) · `lr_decay`.").number(0.0),
    EPS.number(1e-10),
    WEIGHT_DECAY.number(0.0),
    key("initial_accumulator_value", NOT_NEGATIVE, "What the sum of squared gradients starts from.")
        .number(0.0),
    AMSGRAD,
    MAXIMIZE,
    MAX_GRAD_NORM,
    FP32_STATES,
    FUSED,
    FOREACH,
    DIFFERENTIABLE,
];

const LAMB: &[Key] = &[
    LR,
    BETAS,
    EPS,
    WEIGHT_DECAY.number(0.0),
    flag("bias_correction", "Multiplies the step by √(1 − beta₂ᵗ) / (1 − beta₁ᵗ); the trust ratio is that of moments without correction.").boolean(true),
    key("min_coeff", NOT_NEGATIVE, "Lower bound of a tensor's trust ratio ‖parameter‖ / ‖direction‖.")
        .number(0.01),
    key("max_coeff", NOT_NEGATIVE, "Upper bound of the trust ratio.").number(10.0),
    flag("eps_inside_sqrt", "Adds `eps` to the second moment rather than to its root.")
        .only_off("`eps` is added to the root, as in the paper: leave it out"),
    AMSGRAD,
    MAX_GRAD_NORM,
];
