//! Configurations that differ in everything that affects memory.

use serde_json::{Value, json};
use ulysses::model::{ModelConfig, preset};

/// A run of one rank, of 8 heads, with a vocabulary of 256, unless said otherwise.
#[derive(Clone)]
pub(super) struct Case {
    pub(super) label: &'static str,
    pub(super) model: ModelConfig,
    pub(super) dp: usize,
    pub(super) sp: usize,
    pub(super) rows: usize,
    pub(super) seq_len: usize,
    pub(super) config: Value,
}

fn case(label: &'static str, seq_len: usize) -> Case {
    let model = ModelConfig { vocab_size: 256, ..preset("small").unwrap().with_num_layers(2) };
    Case { label, model, dp: 1, sp: 1, rows: 1, seq_len, config: json!({}) }.heads(8, 8)
}

impl Case {
    pub(super) fn small(label: &'static str, seq_len: usize) -> Self {
        let model = ModelConfig { vocab_size: 256, ..preset("nano").unwrap() };
        Self { model, ..case(label, seq_len) }
    }

    fn heads(self, num_heads: usize, num_kv_heads: usize) -> Self {
        let model = self.model.with_attention(|layer| {
            (layer.num_heads, layer.num_kv_heads, layer.head_dim) =
                (num_heads, num_kv_heads, 256 / num_heads);
        });
        Self { model, ..self }
    }

    fn kv_heads(self, num_kv_heads: usize) -> Self {
        self.heads(8, num_kv_heads)
    }

    fn vocab(self, vocab_size: usize) -> Self {
        Self { model: ModelConfig { vocab_size, ..self.model }, ..self }
    }

    fn dp(self, dp: usize) -> Self {
        Self { dp, ..self }
    }

    pub(super) fn sp(self, sp: usize) -> Self {
        Self { sp, ..self }
    }

    /// Sets a key of the config, by its path.
    pub(super) fn set(mut self, path: &str, value: impl Into<Value>) -> Self {
        let entry = path.split('.').fold(&mut self.config, |section, key| &mut section[key]);
        *entry = value.into();
        self
    }

    fn bf16(self) -> Self {
        self.set("bf16.enabled", true)
    }

    fn stage(self, stage: usize) -> Self {
        self.set("zero_optimization.stage", stage)
    }

    /// Partitions over dp and sp.
    fn over_sp(self) -> Self {
        self.set("ulysses.zero_partition_axes", json!(["dp", "sp"]))
    }

    pub(super) fn checkpointed(self) -> Self {
        self.ulysses("activation_checkpointing", true)
    }

    pub(super) fn ulysses(self, key: &str, value: impl Into<Value>) -> Self {
        self.set(&format!("ulysses.{key}"), value)
    }

    fn frozen(self, pattern: &str) -> Self {
        self.ulysses("parameter_groups", json!([{ "match": pattern, "frozen": true }]))
    }

    fn in_file(self, section: &str) -> Self {
        self.set(&format!("zero_optimization.{section}.device"), "nvme")
    }
}

/// Small cases that differ in a GPU's memory.
#[cfg(feature = "nccl")]
pub(super) fn cases_of_gpus() -> Vec<Case> {
    let tiles = |label| {
        let case = case(label, 300).heads(4, 4).vocab(2000).bf16().checkpointed();
        case.ulysses("tile_tokens", 100)
    };
    vec![
        case("one GPU", 200),
        case("checkpointing, GQA", 300).kv_heads(2).checkpointed(),
        case("bf16", 256).kv_heads(4).bf16(),
        tiles("bf16, tiles").ulysses("loss_tile_tokens", 64),
        tiles("bf16, tiled").ulysses("attention", "tiled"),
        case("dp 2, stage 1, bf16", 160).dp(2).stage(1).bf16(),
    ]
}

pub(super) fn cases() -> Vec<Case> {
    let wide = |label, seq_len| case(label, seq_len).kv_heads(4).vocab(4000);
    let tied = |case: Case| Case { model: ModelConfig { tie_word_embeddings: true, ..case.model }, ..case };
    let base = vec![
        case("one rank", 600),
        case("checkpointing", 900).checkpointed(),
        Case { rows: 2, ..case("two rows", 400).kv_heads(2) },
        case("sp 2", 1000).sp(2),
        case("sp 2, GQA, checkpointing", 4096).sp(2).kv_heads(2).checkpointed(),
        case("sp 3, uneven", 1001).sp(3).kv_heads(4),
        case("sp 3, one KV head", 1001).sp(3).kv_heads(1).checkpointed(),
        case("sp 4, bf16", 900).sp(4).kv_heads(2).bf16(),
        case("ring 2", 1000).sp(2).ulysses("ring_size", 2),
        case("ring 3, uneven", 1001).sp(3).kv_heads(4).ulysses("ring_size", 3),
        case("ring 2 x ulysses 2, bf16, checkpointing", 1800)
            .sp(4)
            .kv_heads(2)
            .bf16()
            .checkpointed()
            .ulysses("ring_size", 2),
        case("bf16, checkpointing", 2048).bf16().checkpointed(),
        case("fp16", 1500).vocab(4000).set("fp16.enabled", true),
        case("bf16, loss in tiles", 3000).vocab(4000).bf16().checkpointed().ulysses("loss_tile_tokens", 128),
        case("dp 2, stage 1", 300).dp(2).vocab(4000).stage(1),
        wide("dp 2, stage 2", 300).dp(2).stage(2),
        wide("dp 2, stage 2, gradients sent in bf16", 300)
            .dp(2)
            .stage(2)
            .set("communication_data_type", "bf16"),
        wide("dp 2, stage 0, gradients sent in bf16", 300).dp(2).set("communication_data_type", "bf16"),
        wide("dp 3, stage 3", 600).dp(3).stage(3),
        tied(wide("stage 3, tied, accumulation", 700)).dp(2).stage(3).set("gradient_accumulation_steps", 2),
        case("2 x 2, stage 2, accumulation", 2048).dp(2).sp(2).stage(2).set("gradient_accumulation_steps", 2),
        // Whether a layer's gradient is still in flight at the peak depends on chance: long enough that it does not matter.
        case("2 x 3, stage 3, bf16", 5200).dp(2).sp(3).kv_heads(4).stage(3).bf16(),
        // In both settings the peak of a long sequence is in the loss or in a layer; with a large vocabulary and few
        // tokens it is in the state.
        wide("1 x 4 over sp, stage 3", 900).sp(4).over_sp().stage(3),
        wide("1 x 4 over sp, stage 1", 900).sp(4).over_sp().stage(1),
        case("2 x 2 over sp, stage 3", 4000).dp(2).sp(2).kv_heads(4).over_sp().stage(3),
        wide("2 x 2 over sp, stage 2", 900).dp(2).sp(2).over_sp().stage(2).bf16(),
        case("1 x 4 over sp, bf16", 8000).sp(4).kv_heads(4).over_sp().stage(3).bf16(),
        case("a large vocabulary", 1024).sp(2).vocab(8_000).ulysses("loss_tile_tokens", 256),
        case("SGD", 512).sp(2).set("optimizer", json!({ "type": "SGD", "params": { "lr": 0.1 } })),
    ];
    base.into_iter().chain(memory_cases()).chain(offload_cases()).collect()
}

/// 1,100 tokens for each rank.
fn four_layers(label: &'static str, dp: usize, sp: usize) -> Case {
    let case = case(label, 1100 * sp).dp(dp).sp(sp).kv_heads(4);
    Case { model: case.model.with_num_layers(4), ..case }
}

/// Features that reduce a step's memory: intervals, tiles, head chunks, offload of activations, frozen parameters.
fn memory_cases() -> Vec<Case> {
    let plain = |label, sp| four_layers(label, 1, sp);
    let saved = |label, sp| plain(label, sp).checkpointed();
    let chunks = |case: Case, head_chunks: usize| case.ulysses("head_chunks", head_chunks);
    let overlapping = |case| chunks(case, 2).ulysses("overlap_exchange", true);
    let tiles = |case: Case, tokens: usize| case.ulysses("tile_tokens", tokens);
    let interval = |case: Case| case.ulysses("activation_checkpointing_interval", 2);
    let recomputed = |case: Case| case.ulysses("save_attention_output", false);
    let offloaded = |label, sp| saved(label, sp).set("activation_checkpointing.cpu_checkpointing", true);
    vec![
        interval(saved("every other layer", 1)),
        interval(saved("every other layer, sp 2", 2)),
        tiles(plain("tiles", 1), 128),
        tiles(saved("tiles, checkpointing, sp 2", 2), 100),
        chunks(plain("2 chunks, sp 2", 2), 2),
        chunks(saved("2 chunks, checkpointing, sp 2", 2), 2),
        overlapping(plain("2 chunks that overlap, sp 2", 2)),
        overlapping(saved("2 chunks that overlap, checkpointing, sp 2", 2)),
        chunks(saved("3 chunks, checkpointing", 1), 3),
        chunks(tiles(saved("tiles, chunks, bf16, sp 2", 2), 128), 2).bf16(),
        recomputed(saved("attention recomputed", 1)),
        recomputed(saved("attention recomputed, sp 2", 2)),
        recomputed(overlapping(saved("2 chunks recomputed, sp 2", 2))),
        offloaded("offload", 1),
        offloaded("offload of the attention output", 2).ulysses("save_attention_output", true),
        chunks(tiles(offloaded("offload, tiles, chunks, sp 2", 2), 128), 2),
        plain("frozen MLPs", 1).frozen("mlp"),
        four_layers("frozen matrices, dp 2, stage 3", 2, 1).frozen("_proj").stage(3),
    ]
}

/// State in files.
fn offload_cases() -> Vec<Case> {
    let optimizer = |label, dp, sp| four_layers(label, dp, sp).checkpointed().in_file("offload_optimizer");
    let both = |label, dp, sp| optimizer(label, dp, sp).in_file("offload_param").stage(3);
    // Whether a layer's gradient is still in flight at the peak depends on chance: sequences so long that it does not
    // matter.
    let long = |case: Case| Case { seq_len: 2 * case.seq_len, ..case };
    vec![
        optimizer("optimizer in a file", 1, 1).stage(1),
        optimizer("optimizer in a file, dp 2, bf16", 2, 1).stage(2).bf16(),
        optimizer("optimizer in a file, dp 2, twice", 2, 1)
            .stage(3)
            .bf16()
            .set("gradient_accumulation_steps", 2),
        four_layers("parameters in a file, dp 2", 2, 1).checkpointed().in_file("offload_param").stage(3),
        both("both in files", 1, 1),
        long(both("both in files, dp 2, bf16", 2, 1)).bf16(),
        long(both("both in files, 2 x 2, LAMB", 2, 2)).bf16().set("optimizer.type", "Lamb"),
        long(both("both in files, 1 x 4 over sp, bf16", 1, 4)).over_sp().bf16(),
        long(both("both in files, 2 x 2 over sp", 2, 2)).over_sp(),
        long(optimizer("optimizer in a file, 1 x 4 over sp", 1, 4)).over_sp().stage(3),
        long(optimizer("optimizer in a file, 2 x 2 over sp, bf16", 2, 2)).over_sp().stage(2).bf16(),
    ]
}
