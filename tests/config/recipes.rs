//! Published recipes of long-sequence training: each is read as it is, and means the same here.

use ulysses::config::{
    CommunicationDtype, Config, Offload, Overrides, PartitionAxes, Precision, RawConfig, Setting, Settings,
    Severity, ZeroStage,
};

/// Resolves a recipe with settings of the command line.
fn resolve(text: &str, settings: &[Setting]) -> Config {
    let settings = Settings { set: settings.to_vec(), ..Settings::default() };
    let raw = RawConfig::from_json_str_with(text, "recipe.json", &settings);
    let config = raw.and_then(|raw| raw.resolve(&Overrides::default()));
    config.unwrap_or_else(|error| panic!("{text}\n{error}"))
}

fn mesh_and_axes(config: &Config) -> (usize, usize, PartitionAxes) {
    (config.mesh.dp_size, config.mesh.sp_size, config.zero_axes())
}

/// `examples/alst_ulysses_sequence_parallelism/sp-alst.ds-config.json` of huggingface/accelerate.
const ACCELERATE: &str = r#"{
    "bf16": { "enabled": true },
    "zero_optimization": { "stage": 3 },
    "gradient_accumulation_steps": 1,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "seq_parallel_communication_data_type": "bf16"
}"#;

#[test]
fn the_recipe_of_accelerate_gets_its_mesh_from_the_command_line() {
    let alone = resolve(ACCELERATE, &[]);
    assert_eq!(mesh_and_axes(&alone), (1, 1, PartitionAxes::Dp));
    // The script of the example has `sp_size=4` and a batch of one sequence.
    let set = [Setting::new("sequence_parallel_size", 4), Setting::new("train_micro_batch_size_per_gpu", 1)];
    let config = resolve(ACCELERATE, &set);
    assert_eq!(mesh_and_axes(&config), (1, 4, PartitionAxes::DpSp));
    assert_eq!((config.zero.stage, config.zero_world_size()), (ZeroStage::Parameters, 4));
    assert_eq!(config.precision, Precision::Bf16 { check_grad_overflow: true });
    assert_eq!((config.train_batch_size, config.gradient_accumulation_steps), (1, 1));
    // On one rank nothing is sent.
    assert_eq!(alone.gradient_communication(), CommunicationDtype::Fp32);
    assert_eq!(config.gradient_communication(), CommunicationDtype::Bf16);
}

/// The config of the tutorial "ALST for HF Transformers integration" of deepspeedai/DeepSpeed.
const TUTORIAL: &str = r#"{
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": { "stage": 3 },
    "optimizer": { "type": "Adam", "params": { "lr": 1e-3 } },
    "sequence_parallel_size": 2
}"#;

#[test]
fn the_recipe_of_deepspeeds_tutorial_partitions_over_all_ranks() {
    let config = resolve(TUTORIAL, &[]);
    assert_eq!(mesh_and_axes(&config), (1, 2, PartitionAxes::DpSp));
    assert_eq!((config.zero_world_size(), config.train_batch_size, config.optimizer.lr()), (2, 1, 1e-3));
}

/// `benchmarks/autosp/configs/autosp_config.json` of deepspeedai/DeepSpeedExamples.
const AUTOSP: &str = r#"{
    "bf16": { "enabled": true },
    "zero_optimization": { "stage": 0 },
    "compile": { "deepcompile": true, "passes": ["autosp"] },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "wall_clock_breakdown": false,
    "sequence_parallel_size": 2
}"#;

#[test]
fn the_recipe_of_autosp_is_sequence_parallel() {
    let config = resolve(AUTOSP, &[]);
    assert_eq!((config.mesh.dp_size, config.mesh.sp_size, config.zero.stage), (1, 2, ZeroStage::Disabled));
    assert_eq!((config.train_batch_size, config.steps_per_print, config.gradient_clipping), (1, 2000, 1.0));
}

/// Returns the config that snowflakedb/ArcticTraining gives to DeepSpeed for
/// `projects/sequence-parallelism/run-h100-sp{sp}-*.yml`: the section `deepspeed` of the file, and the keys that its
/// trainer adds. The recipes of one GPU offload parameters too.
fn arctic(sp: usize) -> String {
    let offload_param = if sp == 1 { r#", "offload_param": { "device": "cpu" }"# } else { "" };
    format!(
        r#"{{
            "zero_optimization": {{ "stage": 3, "offload_optimizer": {{ "device": "cpu" }}{offload_param} }},
            "seq_parallel_communication_data_type": "bf16",
            "train_micro_batch_size_per_gpu": 1, "train_batch_size": 1, "gradient_accumulation_steps": 1,
            "sequence_parallel_size": {sp}, "steps_per_print": 10, "bfloat16": {{ "enabled": true }},
            "gradient_clipping": 1.0, "prescale_gradients": false, "wall_clock_breakdown": false
        }}"#
    )
}

/// The GPUs of the recipes with their `max_length`: Llama 8B, Llama 70B and Qwen3 32B.
const ARCTIC: [(usize, &[usize]); 5] = [
    (1, &[500_000, 230_000]),
    (8, &[3_800_000, 200_000, 1_550_000]),
    (16, &[8_000_000, 1_200_000, 4_000_000]),
    (32, &[15_500_000, 4_000_000, 7_000_000]),
    (64, &[10_000_000, 15_000_000]),
];

#[test]
fn the_recipes_of_arctic_training_mean_the_same_on_1_to_64_ranks() {
    for (sp, lengths) in ARCTIC {
        for &seq_len in lengths {
            // The keys of its trainer, as docs/from-deepspeed.md maps them.
            let set = [
                Setting::new("optimizer.type", "cpu_adam"),
                Setting::new("optimizer.params.lr", 1e-5),
                Setting::new("optimizer.params.weight_decay", 0.1),
                Setting::new("ulysses.seq_len", seq_len),
                Setting::new("ulysses.activation_checkpointing", true),
                Setting::new("activation_checkpointing.cpu_checkpointing", true),
                Setting::new("ulysses.tile_tokens", 4096),
            ];
            let config = resolve(&arctic(sp), &set);
            let axes = if sp == 1 { PartitionAxes::Dp } else { PartitionAxes::DpSp };
            assert_eq!((mesh_and_axes(&config), config.zero_world_size()), ((1, sp, axes), sp));
            let params = if sp == 1 { Offload::Cpu } else { Offload::None };
            assert_eq!((config.zero.stage, config.zero.offload_param), (ZeroStage::Parameters, params));
            assert_eq!(config.zero.offload_optimizer, Offload::Cpu);
            assert_eq!(config.precision, Precision::Bf16 { check_grad_overflow: true });
            assert_eq!((config.train_batch_size, config.gradient_clipping), (1, 1.0));
            assert!(config.activation_checkpointing.cpu_checkpointing);
            let warnings: Vec<_> =
                config.notes.iter().filter(|note| note.severity == Severity::Warning).collect();
            assert!(warnings.is_empty(), "{sp}: {warnings:?}");
        }
    }
}
