//! Logs, profilers and monitors.

use super::build::{INDEX, NOT_NEGATIVE, flag, idle, key, section, switch};
use super::key::{Key, Value};

const METRICS: &str = "metrics go to files only: `metrics.jsonl`, and those of `tensorboard` and `csv_monitor`; set \
                       `enabled` to false";

pub(super) const TENSORBOARD: &[Key] = &[
    flag("enabled", "Writes TensorBoard's event files."),
    key("output_path", Value::AnyText, "The directory above that of the job; empty: the run's output.")
        .text(""),
    key("job_name", Value::AnyText, "The directory of the job.").text("tensorboard"),
];

pub(super) const CSV_MONITOR: &[Key] = &[
    flag("enabled", "Writes a CSV file for each metric."),
    key("output_path", Value::AnyText, "The directory above that of the job; empty: the run's output.")
        .text(""),
    key("job_name", Value::AnyText, "The directory of the job.").text("csv"),
];

pub(super) const WANDB: &[Key] = &[
    switch(METRICS),
    idle("group", Value::Anything),
    idle("team", Value::Anything),
    idle("project", Value::Anything),
];

pub(super) const COMET: &[Key] = &[
    switch(METRICS),
    idle("samples_log_interval", INDEX).integer(100),
    idle("project", Value::Anything),
    idle("workspace", Value::Anything),
    idle("api_key", Value::Anything),
    idle("experiment_name", Value::Anything),
    idle("experiment_key", Value::Anything),
    idle("online", Value::Boolean).or_null(),
    idle("mode", Value::Text).or_null(),
];

pub(super) const COMMS_LOGGER: &[Key] = &[
    flag("enabled", "Prints a table of all collectives when the run ends."),
    flag("verbose", "Logs each collective when it completes, at level `info`: RUST_LOG=info shows it."),
    flag("prof_all", "Counts all operations.").boolean(true),
    flag("debug", "Logs who called.").no_effect("`--trace` shows where in a step a collective is"),
    key("prof_ops", Value::List, "The operations that are counted where `prof_all` is false.")
        .derived("`[]`"),
];

const WHOLE: &str = "the parts of the model are told as they are: embedding, every layer, head";

pub(super) const FLOPS_PROFILER: &[Key] = &[
    flag("enabled", "Prints a profile of one step."),
    key("recompute_fwd_factor", NOT_NEGATIVE, "What recomputation adds to the forward.")
        .number(0.0)
        .no_effect("what is recomputed is counted"),
    key("profile_step", Value::Integer { min: 1, max: u64::MAX }, "The step, from 1.").integer(1),
    key("module_depth", Value::Signed, "How deep modules are told.").integer(-1).no_effect(WHOLE),
    key("top_modules", INDEX, "How many modules are told at each depth.").integer(1).no_effect(WHOLE),
    flag("detailed", "Tells the parts of the model besides the sums.").boolean(true),
    key("output_file", Value::Text, "Where the profile goes; standard error without it.").or_null(),
];

const TIMED: &str = "every step is timed anyway";

pub(super) const TIMERS: &[Key] = &[section(
    "throughput",
    &[
        flag("enabled", "Measures throughput.").boolean(true).no_effect(TIMED),
        flag("synchronized", "Waits for the device first.").boolean(true).no_effect(TIMED),
    ],
    "The throughput timer.",
)];
