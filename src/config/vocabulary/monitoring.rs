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

/// The collectives of DeepSpeed by the names of its log, and ours: each with the one of ours that it stands for, if any.
pub(crate) const COLLECTIVES: &[(&str, Option<&str>)] = &[
    ("all_reduce", Some("all_reduce")),
    ("all_reduce_coalesced", Some("all_reduce")),
    ("inference_all_reduce", Some("all_reduce")),
    ("reduce_scatter", Some("reduce_scatter")),
    ("reduce_scatter_tensor", Some("reduce_scatter")),
    ("all_gather", Some("all_gather")),
    ("all_gather_into_tensor", Some("all_gather")),
    ("all_to_all", Some("all_to_all")),
    ("all_to_all_single", Some("all_to_all")),
    ("all_to_all_strided", Some("all_to_all")),
    ("broadcast", Some("broadcast")),
    ("send", Some("send")),
    ("isend", Some("send")),
    ("recv", Some("recv")),
    ("irecv", Some("recv")),
    ("barrier", Some("barrier")),
    ("monitored_barrier", Some("barrier")),
    ("reduce", None),
    ("gather", None),
    ("scatter", None),
    ("all_gather_object", None),
    ("broadcast_object_list", None),
    ("batch_isend_irecv", None),
];

const COLLECTIVE_NAMES: [&str; COLLECTIVES.len()] = {
    let mut names = [""; COLLECTIVES.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = COLLECTIVES[index].0;
        index += 1;
    }
    names
};

pub(super) const COMMS_LOGGER: &[Key] = &[
    flag("enabled", "Prints a table of all collectives when the run ends."),
    flag("verbose", "Logs each collective when it completes, at level `info`: RUST_LOG=info shows it."),
    flag("prof_all", "Counts all operations.").boolean(true),
    flag("debug", "Logs who called.").no_effect("`--trace` shows where in a step a collective is"),
    key(
        "prof_ops",
        Value::Names(&COLLECTIVE_NAMES),
        "The operations that are counted where `prof_all` is false.",
    )
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
