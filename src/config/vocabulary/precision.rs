//! Number formats of training and communication.

use super::build::{COUNT, INDEX, NOT_NEGATIVE, flag, idle, key, switch};
use super::key::{Key, Literal, Value};

const MASTER: &str = "master weights, gradients and optimizer state are f32: leave it out";

pub(super) const FP16: &[Key] = &[
    flag("enabled", "Trains in fp16 with a scaled loss.").auto(Literal::Boolean(false)),
    flag("auto_cast", "Casts the model's inputs to fp16.").no_effect("the inputs are tokens"),
    key("loss_scale", NOT_NEGATIVE, "Factor of the loss; 0 adapts it.").number(0.0),
    key("initial_scale_power", Value::Integer { min: 0, max: 127 }, "An adapted scale starts at 2 to this.")
        .integer(16),
    key("loss_scale_window", COUNT, "Steps without overflow before the scale doubles.").integer(1000),
    key("hysteresis", COUNT, "Overflows before the scale is halved.").integer(2),
    flag("consecutive_hysteresis", "Any step without overflow refills the hysteresis."),
    key("min_loss_scale", COUNT, "The smallest adapted scale.").integer(1),
    flag("fp16_master_weights_and_grads", "Keeps master weights in fp16.").only_off(MASTER),
];

pub(super) const BF16: &[Key] = &[
    flag("enabled", "Trains in bf16.").auto(Literal::Boolean(false)),
    flag("immediate_grad_update", "Adds gradients to the f32 copy as they are produced.")
        .no_effect("gradients are always accumulated at once"),
    flag("check_grad_overflow", "Skips steps whose gradient is not finite.").boolean(true),
    super::build::renamed("check_overflow", "check_grad_overflow", Value::Boolean),
    flag("bf16_master_weights_and_grads", "Keeps master weights and gradients in bf16.").only_off(MASTER),
    flag("bf16_optimizer_states", "Keeps the optimizer state in bf16.").only_off(MASTER),
];

const AUTOCAST: &str = "there is no autocast: use the `bf16` section";

pub(super) const AMP: &[Key] = &[
    switch(AUTOCAST),
    idle("opt_level", Value::Text),
    idle("cast_model_type", Value::Anything),
    idle("patch_torch_functions", Value::Anything),
    idle("keep_batchnorm_fp32", Value::Anything),
    idle("master_weights", Value::Anything),
    idle("loss_scale", Value::Anything),
    idle("cast_model_outputs", Value::Anything),
    idle("num_losses", INDEX),
    idle("verbosity", INDEX),
    idle("min_loss_scale", Value::Anything),
    idle("max_loss_scale", Value::Anything),
];

pub(super) const TORCH_AUTOCAST: &[Key] =
    &[switch(AUTOCAST), idle("dtype", Value::Text), idle("lower_precision_safe_modules", Value::List)];

const FORMATS: Value = Value::Choice(&["fp32", "fp16", "bf16"]);
const F32_ONLY: &[Literal] = &[Literal::Text("fp32")];

/// The format of gradients between ranks.
pub(super) const fn communication(name: &'static str, about: &'static str) -> Key {
    key(name, FORMATS, about)
        .text("fp32")
        .or_null()
        .only(F32_ONLY, "gradients are reduced in f32: write \"fp32\" or leave it out")
}

pub(super) const DATA_TYPES: &[Key] = &[
    key("grad_accum_dtype", FORMATS, "The format that gradients are accumulated in.")
        .text("fp32")
        .or_null()
        .only(F32_ONLY, "gradients are accumulated in f32: write \"fp32\" or leave it out"),
    key("param_dtype", FORMATS, "The format of the parameters.")
        .text("fp32")
        .or_null()
        .only(F32_ONLY, "parameters follow the `bf16` and `fp16` sections: write \"fp32\" or leave it out"),
    key("buffer_dtype", FORMATS, "The format of buffers, such as the rotary frequencies.")
        .text("fp32")
        .or_null()
        .only(F32_ONLY, "buffers are f32: write \"fp32\" or leave it out"),
    key("keep_in_fp32_modules", Value::List, "Modules whose buffers stay in f32.")
        .derived("what the model names")
        .no_effect("buffers are f32"),
];
