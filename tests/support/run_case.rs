//! [`RunCase`]: a run as a case of a test matrix.

use serde_json::{Value, json};
use ulysses::config::Config;
use ulysses::model::ModelConfig;

/// A model, a mesh, a sequence length, and further config.
pub struct RunCase {
    pub label: &'static str,
    pub model: ModelConfig,
    pub dp: usize,
    pub sp: usize,
    /// Sequences of a micro batch.
    pub rows: usize,
    pub seq_len: usize,
    pub config: Value,
}

/// Keys of a config that are axes of the test matrix.
const AXES: [&str; 21] = [
    "/pipeline_parallel_size",
    "/ulysses/pipeline/schedule",
    "/ulysses/pipeline/virtual_stages",
    "/bf16/enabled",
    "/fp16/enabled",
    "/gradient_accumulation_steps",
    "/communication_data_type",
    "/optimizer/type",
    "/activation_checkpointing/cpu_checkpointing",
    "/zero_optimization/stage",
    "/zero_optimization/mics_shard_size",
    "/zero_optimization/offload_optimizer/device",
    "/zero_optimization/offload_param/device",
    "/ulysses/activation_checkpointing",
    "/ulysses/activation_checkpointing_interval",
    "/ulysses/save_attention_output",
    "/ulysses/head_chunks",
    "/ulysses/overlap_exchange",
    "/ulysses/parameter_groups/0/frozen",
    "/ulysses/ring_size",
    "/ulysses/zero_partition_axes",
];

impl RunCase {
    /// A run of one rank.
    pub fn new(label: &'static str, model: ModelConfig, seq_len: usize) -> Self {
        Self { label, model, dp: 1, sp: 1, rows: 1, seq_len, config: json!({}) }
    }

    pub fn dp(self, dp: usize) -> Self {
        Self { dp, ..self }
    }

    pub fn sp(self, sp: usize) -> Self {
        Self { sp, ..self }
    }

    pub fn tp(self, tp: usize) -> Self {
        self.set("tensor_parallel_size", tp)
    }

    pub fn pp(self, pp: usize) -> Self {
        self.set("pipeline_parallel_size", pp)
    }

    /// Sequences of a micro batch.
    pub fn rows(self, rows: usize) -> Self {
        Self { rows, ..self }
    }

    /// Sets a key of the config, by its path.
    pub fn set(mut self, path: &str, value: impl Into<Value>) -> Self {
        let entry = path.split('.').fold(&mut self.config, |section, key| &mut section[key]);
        *entry = value.into();
        self
    }

    /// Sets a key of the section `ulysses`.
    pub fn ulysses(self, key: &str, value: impl Into<Value>) -> Self {
        self.set(&format!("ulysses.{key}"), value)
    }

    pub fn bf16(self) -> Self {
        self.set("bf16.enabled", true)
    }

    pub fn stage(self, stage: usize) -> Self {
        self.set("zero_optimization.stage", stage)
    }

    pub fn accumulation(self, micro_batches: usize) -> Self {
        self.set("gradient_accumulation_steps", micro_batches)
    }

    /// Partitions over dp and sp.
    pub fn over_sp(self) -> Self {
        self.ulysses("zero_partition_axes", json!(["dp", "sp"]))
    }

    pub fn ring(self, ring_size: usize) -> Self {
        self.ulysses("ring_size", ring_size)
    }

    pub fn checkpointed(self) -> Self {
        self.ulysses("activation_checkpointing", true)
    }

    pub fn head_chunks(self, chunks: usize) -> Self {
        self.ulysses("head_chunks", chunks)
    }

    /// Head chunks whose exchanges overlap attention.
    pub fn overlapped(self, chunks: usize) -> Self {
        self.head_chunks(chunks).ulysses("overlap_exchange", true)
    }

    pub fn tiles(self, tokens: usize) -> Self {
        self.ulysses("tile_tokens", tokens)
    }

    /// Recomputes every other layer.
    pub fn every_other(self) -> Self {
        self.checkpointed().ulysses("activation_checkpointing_interval", 2)
    }

    /// Offloads what layers save to host memory.
    pub fn offloaded(self) -> Self {
        self.checkpointed().set("activation_checkpointing.cpu_checkpointing", true)
    }

    /// Recomputes layers, with the attention's output or without.
    pub fn saves_output(self, saves: bool) -> Self {
        self.checkpointed().ulysses("save_attention_output", saves)
    }

    pub fn frozen(self, patterns: &[&str]) -> Self {
        let groups: Vec<_> = patterns.iter().map(|name| json!({ "match": name, "frozen": true })).collect();
        self.ulysses("parameter_groups", groups)
    }

    /// Offload to files.
    pub fn in_file(self, section: &str) -> Self {
        self.set(&format!("zero_optimization.{section}.device"), "nvme")
    }

    pub fn optimizer(self, name: &str) -> Self {
        self.set("optimizer.type", name)
    }

    pub fn config(&self) -> Config {
        let mut config = self.config.clone();
        config["mesh_param"] = json!([self.dp, self.sp]);
        config["train_micro_batch_size_per_gpu"] = json!(self.rows);
        config["ulysses"]["seq_len"] = json!(self.seq_len);
        Config::from_json_str(&config.to_string(), "test.json").unwrap()
    }

    /// Values on the axes of a test matrix.
    pub fn axes(&self) -> Vec<String> {
        let value = |axis: &&str| format!("{axis} {}", self.config.pointer(axis).unwrap_or(&Value::Null));
        let mesh = [format!("dp {}", self.dp), format!("sp {}", self.sp)];
        mesh.into_iter().chain(AXES.iter().map(value)).collect()
    }
}
