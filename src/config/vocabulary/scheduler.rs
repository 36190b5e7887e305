//! The `scheduler` section.

use super::build::{BELOW_1, COUNT, FRACTION, INDEX, NOT_NEGATIVE, flag, key, refused, variant};
use super::key::{Key, Literal, Refused, Value, Variant};

pub(super) const SCHEDULER: &[Key] = &[
    key("type", Value::Variant { variants: SCHEDULERS, refused: REFUSED }, "The schedule.").required(),
    key("params", Value::Params(SCHEDULERS), "Its parameters."),
];

const SCHEDULERS: &[Variant] = &[
    variant("WarmupLR", WARMUP_LR),
    variant("WarmupDecayLR", WARMUP_DECAY_LR),
    variant("WarmupCosineLR", WARMUP_COSINE_LR),
    variant("OneCycle", ONE_CYCLE),
    variant("LRRangeTest", LR_RANGE_TEST),
];

const COSINE: &str = "the schedule is called \"WarmupCosineLR\" here";
const OTHER: &str =
    "the schedules here are WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle and LRRangeTest";

/// Names of Hugging Face's Trainer and of PyTorch.
const REFUSED: &[Refused] = &[
    refused("cosine", COSINE),
    refused("cosine_with_min_lr", "the schedule is called \"WarmupCosineLR\" here, with `cos_min_ratio`"),
    refused("CosineAnnealingLR", COSINE),
    refused("linear", "the schedule is called \"WarmupDecayLR\" here, with `warmup_type` \"linear\""),
    refused("constant", "leave `scheduler` out: the rate is the optimizer's `lr` throughout"),
    refused(
        "constant_with_warmup",
        "the schedule is called \"WarmupLR\" here, with `warmup_type` \"linear\"",
    ),
    refused("OneCycleLR", "the schedule is called \"OneCycle\" here"),
    refused("cosine_with_restarts", OTHER),
    refused("polynomial", OTHER),
    refused("inverse_sqrt", OTHER),
    refused("warmup_stable_decay", OTHER),
];

const FROM_OPTIMIZER: &str = "the optimizer's `lr`";

const WARMUP_MIN_LR: Key =
    key("warmup_min_lr", NOT_NEGATIVE, "Rate at the start.").number(0.0).auto(Literal::Number(0.0));

/// `"auto"` is the Trainer's `warmup_steps`, 0 by default; every schedule warms up for 2 at least.
const WARMUP_NUM_STEPS: Key =
    key("warmup_num_steps", INDEX, "Length of the warm-up; less than 2 is read as 2.")
        .integer(1000)
        .auto(Literal::Integer(0));

const WARMUP_TYPE: Key =
    key("warmup_type", Value::Choice(&["log", "linear"]), "Form of the warm-up.").text("log");

const TOTAL_NUM_STEPS: Key = key("total_num_steps", COUNT, "Where the decay ends.")
    .required()
    .auto_derived("the steps to train: `ulysses.steps` or `--steps`");

const LAST_BATCH_ITERATION: Key =
    key("last_batch_iteration", Value::Signed, "The step to resume from, in DeepSpeed.")
        .default(Literal::Integer(-1))
        .only(&[Literal::Integer(-1)], "a schedule starts with the run: leave it out");

const WARMUP_LR: &[Key] = &[
    WARMUP_MIN_LR,
    key("warmup_max_lr", NOT_NEGATIVE, "Rate after the warm-up.").derived(FROM_OPTIMIZER),
    WARMUP_NUM_STEPS,
    WARMUP_TYPE,
    LAST_BATCH_ITERATION,
];

const WARMUP_DECAY_LR: &[Key] = &[
    TOTAL_NUM_STEPS,
    WARMUP_MIN_LR,
    key("warmup_max_lr", NOT_NEGATIVE, "Rate after the warm-up.").number(1e-3).auto_derived(FROM_OPTIMIZER),
    WARMUP_NUM_STEPS,
    WARMUP_TYPE,
    LAST_BATCH_ITERATION,
];

const WARMUP_COSINE_LR: &[Key] = &[
    TOTAL_NUM_STEPS,
    key("warmup_min_ratio", FRACTION, "Ratio to the optimizer's `lr` at the start.").number(0.0),
    WARMUP_NUM_STEPS,
    key("cos_min_ratio", FRACTION, "Ratio to the optimizer's `lr` at the end.").number(1e-4),
    WARMUP_TYPE,
    LAST_BATCH_ITERATION,
];

const ONE_CYCLE: &[Key] = &[
    key("cycle_min_lr", NOT_NEGATIVE, "Lower end of the cycle.").required(),
    key("cycle_max_lr", NOT_NEGATIVE, "Upper end of the cycle.").required(),
    key("decay_lr_rate", NOT_NEGATIVE, "How fast the rate falls after the cycle.").number(0.0),
    key("cycle_first_step_size", COUNT, "Length of the rising half.").integer(2000),
    key("cycle_second_step_size", INDEX, "Length of the falling half.")
        .derived("that of the rising one")
        .or_null(),
    key("cycle_first_stair_count", INDEX, "Stairs of the rising half; 0 is smooth.").integer(0),
    key("cycle_second_stair_count", INDEX, "Stairs of the falling half.")
        .derived("that of the rising one")
        .or_null(),
    key("decay_step_size", INDEX, "Length of one decay interval; 0 for no decay.").integer(0),
    flag("cycle_momentum", "Whether the optimizer's first beta cycles too.").boolean(true),
    key("cycle_min_mom", Value::Number(BELOW_1), "Lower end for the beta.").number(0.8),
    key("cycle_max_mom", Value::Number(BELOW_1), "Upper end for the beta.").number(0.9),
    key("decay_mom_rate", NOT_NEGATIVE, "How fast the beta grows after the cycle.").number(0.0),
    LAST_BATCH_ITERATION,
];

const LR_RANGE_TEST: &[Key] = &[
    key("lr_range_test_min_lr", NOT_NEGATIVE, "Rate at the start.").number(1e-3),
    key("lr_range_test_step_size", COUNT, "Length of one interval.").integer(2000),
    key("lr_range_test_step_rate", NOT_NEGATIVE, "Growth per interval.").number(1.0),
    flag("lr_range_test_staircase", "Whether to grow once per interval rather than at every step."),
    LAST_BATCH_ITERATION,
];
