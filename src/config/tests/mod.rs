//! Tests of the module as a whole: text in, errors or a config out.

mod auto;
mod data;
mod diagnostics;
mod machine;
mod mesh;
mod names;
mod pipeline;
mod resolution;
mod robustness;
mod settings;
mod tensor_parallel;
mod vocabulary;

use super::*;

/// The message of the error that `text` gives as the file `c.json`, without excerpts.
fn message(text: &str) -> String {
    let message = full_message(text);
    let is_excerpt = |line: &&str| {
        line.trim_start_matches(|char: char| char == ' ' || char.is_ascii_digit()).starts_with('|')
    };
    message.lines().filter(|line| !is_excerpt(line)).collect::<Vec<_>>().join("\n")
}

/// The same with excerpts.
fn full_message(text: &str) -> String {
    match Config::from_json_str(text, "c.json") {
        Ok(config) => panic!("accepted: {config:?}"),
        Err(error) => error.to_string(),
    }
}

/// The config of a file with the given members and a batch size.
fn config_with(members: &str) -> Config {
    let text = format!("{{\"train_micro_batch_size_per_gpu\": 1, {members}}}");
    Config::from_json_str(&text, "c.json").unwrap_or_else(|error| panic!("{error}"))
}

/// A file that uses every section and most keys.
const FULL: &str = r#"{
  "train_batch_size": 32,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 4,
  "data_parallel_size": 2,
  "sequence_parallel_size": 4,
  "mesh_param": [2, 4],
  "steps_per_print": 7,
  "wall_clock_breakdown": false,
  "seed": 18446744073709551615,
  "loss_normalization": "micro_batch",
  "gradient_clipping": 0.5,
  "fp16": { "enabled": false },
  "bf16": { "enabled": false },
  "optimizer": {
    "type": "adam",
    "params": {
      "lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.02,
      "adam_w_mode": false, "bias_correction": false, "torch_adam": true
    }
  },
  "scheduler": {
    "type": "OneCycle",
    "params": {
      "cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "decay_lr_rate": 0.25, "cycle_first_step_size": 10,
      "cycle_second_step_size": 30, "cycle_first_stair_count": 5, "cycle_second_stair_count": 3,
      "decay_step_size": 4, "cycle_momentum": true, "cycle_min_mom": 0.7, "cycle_max_mom": 0.95,
      "decay_mom_rate": 0.001
    }
  },
  "zero_optimization": {
    "stage": 2, "contiguous_gradients": true, "overlap_comm": true, "reduce_scatter": true,
    "reduce_bucket_size": 5e8, "allgather_bucket_size": 500000000, "allgather_partitions": true,
    "round_robin_gradients": false,
    "offload_optimizer": { "device": "nvme", "nvme_path": "/fast" }
  },
  "activation_checkpointing": { "cpu_checkpointing": true },
  "checkpoint": { "interval": 50, "memory_interval": 5, "keep_last": 3, "keep_best": true, "async": true, "on_error": "continue" },
  "ulysses": {
    "model": "models/größer", "data": "data.txt", "tokenizer": "tok.json", "output": "out",
    "seq_len": 1000, "steps": 12, "threads_per_rank": 3, "backend": "thread",
    "activation_checkpointing": true, "loss_tile_tokens": 64,
    "activation_checkpointing_interval": 2, "save_attention_output": true, "tile_tokens": 100, "head_chunks": 4,
    "overlap_exchange": true,
    "offload_path": "/scratch", "attention": "tiled"
  }
}"#;
