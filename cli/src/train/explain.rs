//! Messages of a rank: the expected duration of a long first step, and the cause of an out-of-memory error.

use crate::output::log_line;
use ulysses::config::{Config, Offload, PartitionAxes, ZeroStage};
use ulysses::engine::Engine;
use ulysses::estimate::RankStep;
use ulysses::memory::ByCategory;
use ulysses::mesh::DeviceMesh;
use ulysses::model::ModelConfig;
use ulysses::monitor::{format_bytes as bytes, format_flops as flops};

/// Minimum duration of a first step that is announced.
const LONG_SECONDS: f64 = 10.0;

/// Typical FLOP rate of training as a share of the GEMM rate.
const TYPICAL_SHARE: f64 = 0.5;

/// Logs the expected duration of the first step if it is long. `peak` is the GEMM rate of all ranks.
pub(super) fn log_first_step(
    config: &Config,
    model: &ModelConfig,
    mesh: &DeviceMesh,
    seq_len: usize,
    peak: f64,
) {
    let config = config.clone().with_seq_len(seq_len);
    // Rank 0 is representative: ranks differ by few tokens or heads.
    let Ok(step) = RankStep::of(&config, model, mesh, 0) else { return };
    let work = mesh.world_size() as f64 * step.flops.values().sum::<f64>();
    first_step(work, peak).into_iter().for_each(log_line);
}

/// Adds to an out-of-memory error: the part of the step, the stored state, the planned peak, and what needs less memory.
pub(super) fn explain_out_of_memory(
    error: anyhow::Error,
    config: &Config,
    engine: Option<&Engine>,
    planned: Option<String>,
) -> anyhow::Error {
    if !is_out_of_memory(&error) {
        return error;
    }
    let part = engine.and_then(Engine::part);
    let part = part.map_or_else(|| "before the first step".to_owned(), |part| format!("during {part}"));
    let state = engine.map_or_else(String::new, |engine| stored_state(engine.state_by_category()));
    let (planned, less) = (planned.unwrap_or_default(), less_memory(config));
    error.context(format!("out of memory {part}{state}{planned}; to reduce memory: {less}"))
}

fn stored_state(state: ByCategory) -> String {
    let ByCategory { parameters, gradients, optimizer, .. } = state;
    let [parameters, gradients, optimizer] =
        [parameters, gradients, optimizer].map(|held| bytes(held as f64));
    format!("; stored state: parameters {parameters}, gradients {gradients}, optimizer {optimizer}")
}

/// Lists the next changes of the config that lower the peak, most effective first.
fn less_memory(config: &Config) -> String {
    let (ulysses, stage) = (&config.ulysses, u8::from(config.zero.stage));
    let stage = format!("`zero_optimization.stage`: {}", stage + 1);
    let is_over_sp = config.zero_axes() == PartitionAxes::DpSp;
    let axes = match config.zero.stage {
        ZeroStage::Disabled => {
            "`zero_optimization.stage`: 3 with `ulysses.zero_partition_axes`: [\"dp\", \"sp\"]"
        }
        _ => "`ulysses.zero_partition_axes`: [\"dp\", \"sp\"]",
    };
    let candidates = [
        (config.micro_batch_size > 1, "a smaller `train_micro_batch_size_per_gpu`"),
        (!ulysses.activation_checkpointing, "`ulysses.activation_checkpointing`: true"),
        (config.can_partition_over_sp() && !is_over_sp, axes),
        (config.zero.stage != ZeroStage::Parameters && config.zero_world_size() > 1, stage.as_str()),
        (ulysses.tile_tokens.is_none(), "`ulysses.tile_tokens`: 2048"),
        (config.zero.offload_optimizer == Offload::None, "`zero_optimization.offload_optimizer`"),
        (true, "more sp ranks (`--mesh`)"),
    ];
    let applicable = candidates.into_iter().filter(|(applies, _)| *applies).map(|(_, change)| change);
    applicable.take(3).collect::<Vec<_>>().join(", ")
}

fn first_step(work: f64, peak: f64) -> Option<String> {
    let seconds = work / (TYPICAL_SHARE * peak);
    (seconds > LONG_SECONDS).then(|| {
        format!(
            "estimated time of the first step: {} ({} at half of the measured GEMM rate of all ranks, which is {}/s)",
            duration(seconds),
            flops(work),
            flops(peak)
        )
    })
}

fn duration(seconds: f64) -> String {
    const UNITS: [(&str, f64); 4] = [("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0)];
    // At least two of the unit, so that a whole number is precise enough.
    let (unit, size) = UNITS.into_iter().find(|(_, size)| seconds >= 2.0 * size).unwrap_or(UNITS[3]);
    format!("{:.0} {unit}", seconds / size)
}

/// Recognizes out-of-memory errors by the wording of drivers and system.
fn is_out_of_memory(error: &anyhow::Error) -> bool {
    const SIGNS: [&str; 4] =
        ["out of memory", "out of gpu memory", "out_of_memory", "cannot allocate memory"];
    error.chain().any(|cause| {
        let cause = cause.to_string().to_lowercase();
        SIGNS.iter().any(|sign| cause.contains(sign))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_first_step_is_announced() {
        assert_eq!(first_step(4e9, 1e9), None);
        let expected = "estimated time of the first step: 20 s (10.00 GFLOP at half of the measured GEMM rate of all ranks, which is 1.00 GFLOP/s)";
        assert_eq!(first_step(10e9, 1e9).as_deref(), Some(expected));
        assert_eq!([119.0, 7200.0, 1e6].map(duration), ["119 s", "2 hours", "12 days"]);
    }

    #[test]
    fn an_out_of_memory_error_names_the_keys_that_are_left() {
        let config = |text: &str| Config::from_json_str(text, "c.json").unwrap();
        let plain =
            r#"{ "train_micro_batch_size_per_gpu": 2, "mesh_param": [2, 1], "ulysses": { "seq_len": 64 } }"#;
        let plain = config(plain);
        let expected = "a smaller `train_micro_batch_size_per_gpu`, `ulysses.activation_checkpointing`: true, \
                        `zero_optimization.stage`: 1";
        assert_eq!(less_memory(&plain), expected);
        let small = r#"{ "train_batch_size": 1, "zero_optimization": { "stage": 3 },
                         "ulysses": { "seq_len": 64, "activation_checkpointing": true, "tile_tokens": 32 } }"#;
        let expected = "`zero_optimization.offload_optimizer`, more sp ranks (`--mesh`)";
        assert_eq!(less_memory(&config(small)), expected);
        let over_sp = |stage: u8, axes: &str| {
            let text = format!(
                r#"{{ "train_batch_size": 1, "mesh_param": [1, 8], "zero_optimization": {{ "stage": {stage} }},
                     "ulysses": {{ "seq_len": 64, "activation_checkpointing": true, "tile_tokens": 32,
                                   "zero_partition_axes": {axes} }} }}"#
            );
            less_memory(&config(&text))
        };
        let (axes, offload) =
            (r#"`ulysses.zero_partition_axes`: ["dp", "sp"]"#, "`zero_optimization.offload_optimizer`");
        assert_eq!(over_sp(2, r#"["dp"]"#), format!("{axes}, {offload}, more sp ranks (`--mesh`)"));
        let with_stage =
            format!("`zero_optimization.stage`: 3 with {axes}, {offload}, more sp ranks (`--mesh`)");
        assert_eq!(over_sp(0, r#"["dp"]"#), with_stage);
        let stage_3 = format!("`zero_optimization.stage`: 3, {offload}, more sp ranks (`--mesh`)");
        assert_eq!(over_sp(2, r#"["dp", "sp"]"#), stage_3);
        let error = || anyhow::anyhow!("out of GPU memory: requested 1.00 GiB");
        let explained = format!("{:#}", explain_out_of_memory(error(), &plain, None, None));
        assert!(
            explained.starts_with("out of memory before the first step; to reduce memory: "),
            "{explained}"
        );
        assert!(explained.ends_with(": out of GPU memory: requested 1.00 GiB"), "{explained}");
        let planned = "; planned peak: 3.00 GiB per rank".to_owned();
        let explained = format!("{:#}", explain_out_of_memory(error(), &plain, None, Some(planned)));
        assert!(explained.contains("; planned peak: 3.00 GiB per rank; to"), "{explained}");
    }

    #[test]
    fn out_of_memory_errors_are_recognized() {
        for (message, is_memory) in [
            ("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")", true),
            ("Cannot allocate memory (os error 12)", true),
            ("rank 1 left", false),
        ] {
            let error = anyhow::anyhow!(message).context("step 3");
            assert_eq!(is_out_of_memory(&error), is_memory, "{message}");
        }
    }
}
