//! Configurations that differ in everything that affects memory.

use crate::support::run_case::RunCase;
use serde_json::json;
use ulysses::model::{ModelConfig, preset};

fn model(num_heads: usize, num_kv_heads: usize, vocab_size: usize) -> ModelConfig {
    let small = preset("small").unwrap().with_num_layers(2).with_attention(|layer| {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (num_heads, num_kv_heads, 256 / num_heads);
    });
    ModelConfig { vocab_size, ..small }
}

/// With fewer KV heads.
fn grouped(label: &'static str, num_kv_heads: usize, seq_len: usize) -> RunCase {
    RunCase::new(label, model(8, num_kv_heads, 256), seq_len)
}

fn case(label: &'static str, seq_len: usize) -> RunCase {
    grouped(label, 8, seq_len)
}

/// Small cases that differ in a GPU's memory.
#[cfg(feature = "nccl")]
pub(super) fn cases_of_gpus() -> Vec<RunCase> {
    let tiles = |label| RunCase::new(label, model(4, 4, 2000), 300).bf16().checkpointed().tiles(100);
    vec![
        case("one GPU", 200),
        grouped("checkpointing, GQA", 2, 300).checkpointed(),
        grouped("bf16", 4, 256).bf16(),
        tiles("bf16, tiles").ulysses("loss_tile_tokens", 64),
        tiles("bf16, tiled").ulysses("attention", "tiled"),
        case("dp 2, stage 1, bf16", 160).dp(2).stage(1).bf16(),
    ]
}

pub(super) fn cases() -> Vec<RunCase> {
    let wide = |label, seq_len| RunCase::new(label, model(8, 4, 4000), seq_len);
    let tied = ModelConfig { tie_word_embeddings: true, ..model(8, 4, 4000) };
    let base = vec![
        case("one rank", 600),
        case("checkpointing", 900).checkpointed(),
        grouped("two rows", 2, 400).rows(2),
        case("sp 2", 1000).sp(2),
        grouped("sp 2, GQA, checkpointing", 2, 4096).sp(2).checkpointed(),
        grouped("sp 3, uneven", 4, 1001).sp(3),
        grouped("sp 3, one KV head", 1, 1001).sp(3).checkpointed(),
        grouped("sp 4, bf16", 2, 900).sp(4).bf16(),
        case("ring 2", 1000).sp(2).ring(2),
        grouped("ring 3, uneven", 4, 1001).sp(3).ring(3),
        grouped("ring 2 x ulysses 2, bf16, checkpointing", 2, 1800).sp(4).bf16().checkpointed().ring(2),
        case("bf16, checkpointing", 2048).bf16().checkpointed(),
        RunCase::new("fp16", model(8, 8, 4000), 1500).set("fp16.enabled", true),
        RunCase::new("bf16, loss in tiles", model(8, 8, 4000), 3000)
            .bf16()
            .checkpointed()
            .ulysses("loss_tile_tokens", 128),
        RunCase::new("dp 2, stage 1", model(8, 8, 4000), 300).dp(2).stage(1),
        wide("dp 2, stage 2", 300).dp(2).stage(2),
        wide("dp 2, stage 2, gradients sent in bf16", 300)
            .dp(2)
            .stage(2)
            .set("communication_data_type", "bf16"),
        wide("dp 2, stage 0, gradients sent in bf16", 300).dp(2).set("communication_data_type", "bf16"),
        wide("dp 3, stage 3", 600).dp(3).stage(3),
        RunCase::new("stage 3, tied, accumulation", tied, 700).dp(2).stage(3).accumulation(2),
        case("2 x 2, stage 2, accumulation", 2048).dp(2).sp(2).stage(2).accumulation(2),
        // Whether a layer's gradient is still in flight at the peak depends on chance: long enough that it does not matter.
        grouped("2 x 3, stage 3, bf16", 4, 5200).dp(2).sp(3).stage(3).bf16(),
        // In both settings the peak of a long sequence is in the loss or in a layer; with a large vocabulary and few
        // tokens it is in the state.
        wide("1 x 4 over sp, stage 3", 900).sp(4).over_sp().stage(3),
        wide("1 x 4 over sp, stage 1", 900).sp(4).over_sp().stage(1),
        grouped("2 x 2 over sp, stage 3", 4, 4000).dp(2).sp(2).over_sp().stage(3),
        wide("2 x 2 over sp, stage 2", 900).dp(2).sp(2).over_sp().stage(2).bf16(),
        grouped("1 x 4 over sp, bf16", 4, 8000).sp(4).over_sp().stage(3).bf16(),
        RunCase::new("a large vocabulary", model(8, 8, 8_000), 1024).sp(2).ulysses("loss_tile_tokens", 256),
        case("SGD", 512).sp(2).set("optimizer", json!({ "type": "SGD", "params": { "lr": 0.1 } })),
    ];
    base.into_iter().chain(memory_cases()).chain(offload_cases()).collect()
}

/// 1,100 tokens for each rank.
fn four_layers(label: &'static str, dp: usize, sp: usize) -> RunCase {
    RunCase::new(label, model(8, 4, 256).with_num_layers(4), 1100 * sp).dp(dp).sp(sp)
}

/// Features that reduce a step's memory: intervals, tiles, head chunks, offload of activations, frozen parameters.
fn memory_cases() -> Vec<RunCase> {
    let case = |label, sp| four_layers(label, 1, sp);
    vec![
        case("every other layer", 1).every_other(),
        case("every other layer, sp 2", 2).every_other(),
        case("tiles", 1).tiles(128),
        case("tiles, checkpointing, sp 2", 2).tiles(100).checkpointed(),
        case("2 chunks, sp 2", 2).head_chunks(2),
        case("2 chunks, checkpointing, sp 2", 2).head_chunks(2).checkpointed(),
        case("2 chunks that overlap, sp 2", 2).overlapped(2),
        case("2 chunks that overlap, checkpointing, sp 2", 2).overlapped(2).checkpointed(),
        case("3 chunks, checkpointing", 1).head_chunks(3).checkpointed(),
        case("tiles, chunks, bf16, sp 2", 2).tiles(128).head_chunks(2).checkpointed().bf16(),
        case("attention recomputed", 1).saves_output(false),
        case("attention recomputed, sp 2", 2).saves_output(false),
        case("2 chunks recomputed, sp 2", 2).overlapped(2).saves_output(false),
        case("offload", 1).offloaded(),
        case("offload of the attention output", 2).offloaded().saves_output(true),
        case("offload, tiles, chunks, sp 2", 2).offloaded().tiles(128).head_chunks(2),
        case("frozen MLPs", 1).frozen(&["mlp"]),
        four_layers("frozen matrices, dp 2, stage 3", 2, 1).frozen(&["_proj"]).stage(3),
    ]
}

/// State in files.
fn offload_cases() -> Vec<RunCase> {
    let optimizer = |label, dp, sp| four_layers(label, dp, sp).checkpointed().in_file("offload_optimizer");
    let both = |label, dp, sp| optimizer(label, dp, sp).in_file("offload_param").stage(3);
    // Whether a layer's gradient is still in flight at the peak depends on chance: sequences so long that it does not
    // matter.
    let long = |case: RunCase| RunCase { seq_len: 2 * case.seq_len, ..case };
    vec![
        optimizer("optimizer in a file", 1, 1).stage(1),
        optimizer("optimizer in a file, dp 2, bf16", 2, 1).stage(2).bf16(),
        optimizer("optimizer in a file, dp 2, twice", 2, 1).stage(3).bf16().accumulation(2),
        four_layers("parameters in a file, dp 2", 2, 1).checkpointed().in_file("offload_param").stage(3),
        both("both in files", 1, 1),
        long(both("both in files, dp 2, bf16", 2, 1)).bf16(),
        long(both("both in files, 2 x 2, LAMB", 2, 2)).bf16().optimizer("Lamb"),
        long(both("both in files, 1 x 4 over sp, bf16", 1, 4)).over_sp().bf16(),
        long(both("both in files, 2 x 2 over sp", 2, 2)).over_sp(),
        long(optimizer("optimizer in a file, 1 x 4 over sp", 1, 4)).over_sp().stage(3),
        long(optimizer("optimizer in a file, 2 x 2 over sp, bf16", 2, 2)).over_sp().stage(2).bf16(),
    ]
}
