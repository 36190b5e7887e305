//! The config that plans assume without a file.

use serde_json::json;
use ulysses::config::Config;
use ulysses::device::DeviceKind;
use ulysses::monitor::counted;

/// The batch of an assumed config.
#[derive(Clone, Copy)]
pub(super) enum AssumedBatch {
    /// Micro batches of one sequence.
    OnePerRank,
    /// A global batch of this many sequences.
    Global(usize),
}

/// Returns typical settings for long sequences on many ranks. `partitions_sp`: whether ZeRO partitions over dp and sp.
pub(super) fn assumed_config(batch: AssumedBatch, partitions_sp: bool) -> String {
    let (key, size) = match batch {
        AssumedBatch::OnePerRank => ("train_micro_batch_size_per_gpu", 1),
        AssumedBatch::Global(size) => ("train_batch_size", size),
    };
    let axes: &[&str] = if partitions_sp { &["dp", "sp"] } else { &["dp"] };
    let config = json!({
        key: size,
        "bf16": { "enabled": true },
        "zero_optimization": { "stage": 3 },
        "ulysses": { "activation_checkpointing": true, "zero_partition_axes": axes },
    });
    config.to_string()
}

/// The name of a config that is not a file, for errors.
pub(super) const ASSUMED: &str = "the assumed config";

/// Describes dtype, optimizer and device.
pub(super) fn basics(config: &Config, device: DeviceKind) -> String {
    let written = serde_json::to_value(config).unwrap_or_default();
    let optimizer = match written["optimizer"]["type"].as_str() {
        Some("Adam") if written["optimizer"]["params"]["adam_w_mode"] == true => "AdamW",
        Some(optimizer) => optimizer,
        None => "AdamW",
    };
    let ranks = match device {
        DeviceKind::Cpu => "ranks on CPUs (--device cuda for GPUs)",
        DeviceKind::Cuda => "ranks on GPUs",
    };
    format!("{}, {optimizer}, {ranks}", config.precision.dtype().as_str())
}

/// Describes the settings of a plan.
pub(super) fn settings(config: &Config, device: DeviceKind) -> String {
    let checkpointing = match config.ulysses.activation_checkpointing {
        true => "activation checkpointing",
        false => "no activation checkpointing",
    };
    format!(
        "micro batches of {}, ZeRO stage {}, {checkpointing}, {}",
        counted(config.micro_batch_size, "sequence"),
        config.zero_axes().with_stage(config.zero.stage),
        basics(config, device)
    )
}
