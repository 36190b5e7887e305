//! The explanation of an out-of-memory error: where it happened, what is stored, and what needs less memory.

use super::ranks::causes;
use crate::config::{Config, Offload, PartitionAxes, ZeroStage};
use crate::engine::{Engine, EngineError};
use crate::kernels::memory::ByCategory;
use crate::monitor::format_bytes as bytes;
use crate::trainer::TrainerError;

/// Adds to an out-of-memory error: the part of the step, the stored state, the clause of the planned peak, and what needs
/// less memory.
pub(super) fn explain(
    error: TrainerError,
    config: &Config,
    engine: Option<&Engine>,
    planned: Option<String>,
) -> TrainerError {
    let source = match error {
        TrainerError::Engine(source) if is_out_of_memory(&source) => source,
        error => return error,
    };
    let part = engine.and_then(Engine::part);
    let part = part.map_or_else(|| "before the first step".to_owned(), |part| format!("during {part}"));
    let state = engine.map_or_else(String::new, |engine| stored_state(engine.state_by_category()));
    let (planned, less) = (planned.unwrap_or_default(), less_memory(config));
    TrainerError::OutOfMemory {
        circumstances: format!("{part}{state}{planned}; to reduce memory: {less}"),
        source,
    }
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

/// Recognizes out-of-memory errors by the wording of drivers and system.
fn is_out_of_memory(error: &EngineError) -> bool {
    const SIGNS: [&str; 4] =
        ["out of memory", "out of gpu memory", "out_of_memory", "cannot allocate memory"];
    causes(error).any(|cause| {
        let cause = cause.to_string().to_lowercase();
        SIGNS.iter().any(|sign| cause.contains(sign))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::with_causes;

    fn engine_error(message: &str) -> EngineError {
        candle_core::Error::Msg(message.to_owned()).context("step 3").into()
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
        let explained = |planned: Option<&str>| {
            let error = engine_error("out of GPU memory: requested 1.00 GiB").into();
            with_causes(&explain(error, &plain, None, planned.map(str::to_owned)))
        };
        let alone = explained(None);
        assert!(alone.starts_with("out of memory before the first step; to reduce memory: "), "{alone}");
        assert!(alone.ends_with("out of GPU memory: requested 1.00 GiB"), "{alone}");
        let planned = explained(Some("; planned peak: 3.00 GiB per rank"));
        assert!(planned.contains("; planned peak: 3.00 GiB per rank; to"), "{planned}");
    }

    #[test]
    fn out_of_memory_errors_are_recognized() {
        for (message, is_memory) in [
            ("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")", true),
            ("Cannot allocate memory (os error 12)", true),
            ("rank 1 left", false),
        ] {
            assert_eq!(is_out_of_memory(&engine_error(message)), is_memory, "{message}");
        }
    }
}
