//! Bytes of the engine's Ulysses exchanges in a real step, compared with values computed by hand.

use crate::support::mesh_run::{Problem, global_batch, layout, llama_config, micro_batches, on_mesh};
use crate::support::problems::{CONFIG, problem};
use crate::support::reference::latent_attention::VALUE_DIM;
use crate::support::reference::{Batch, Family, ReferenceConfig};
use anyhow::Result;
use serde_json::json;
use std::sync::Arc;
use ulysses::comm::thread::LaunchOptions;
use ulysses::comm::{CollectiveOp, OpStats, ProcessGroupExt};
use ulysses::engine::Engine;
use ulysses::kernels::attention::{FlashAttention, grouped_heads};
use ulysses::mesh::SeqSharding;
use ulysses::nn::MixerConfig;
use ulysses::sequence_parallel::{AttentionShape, ExchangePlan, ExchangeVolume, RingVolume, SpShard};

/// Eight query heads and four KV heads over three ranks: heads 3/3/2 with KV sets {0,1},
/// {1,2}, {3}, tokens 22/21/21 of 64.
const SP: usize = 3;

/// Head vectors that each rank sends per sequence and layer: q, k and v for the other ranks' heads,
/// and the output of its own heads for the other ranks' tokens.
const FORWARD: [u64; SP] = [
    22 * (3 + 2 * 2) + 22 * (2 + 2) + (21 + 21) * 3,
    21 * (3 + 2 * 2) + 21 * (2 + 2) + (22 + 21) * 3,
    21 * (3 + 2 * 2) + 21 * (3 + 2 * 2) + (22 + 21) * 2,
];

/// The output's gradient for the other ranks' heads, and the gradients of q, k and v of its own
/// heads for the other ranks' tokens.
const BACKWARD: [u64; SP] = [
    22 * 3 + 22 * 2 + (21 + 21) * (3 + 2 * 2),
    21 * 3 + 21 * 2 + (22 + 21) * (3 + 2 * 2),
    21 * 3 + 21 * 3 + (22 + 21) * (2 + 2),
];

/// The part of the forward for q, k and v.
const QKV: [u64; SP] =
    [22 * (3 + 2 * 2) + 22 * (2 + 2), 21 * (3 + 2 * 2) + 21 * (2 + 2), 21 * (3 + 2 * 2) + 21 * (3 + 2 * 2)];

/// Numbers, not head vectors, that each rank sends per sequence and layer if the attention output is saved: the
/// `delta` of its tokens for the other ranks' heads.
const DELTA: [u64; SP] = [22 * 3 + 22 * 2, 21 * 3 + 21 * 2, 21 * 3 + 21 * 3];

const SEQUENCES: usize = 2;

#[test]
fn the_volumes_of_the_plan_match_hand_computed_ones() {
    assert_eq!(FORWARD, [368, 360, 380]);
    assert_eq!(BACKWARD, [404, 406, 298]);
    assert_eq!((QKV, DELTA), ([242, 231, 294], [110, 105, 126]));
}

/// The exchange counters of this rank, after all peers have read its data.
fn exchanged(engine: &Engine) -> Result<OpStats> {
    engine.sp_group().barrier()?;
    Ok(engine.sp_group().stats().get(CollectiveOp::AllToAllStrided))
}

/// Calls and bytes that each rank sends in a forward and in a backward pass.
fn measure(sp: usize, ulysses: serde_json::Value) -> Vec<[(u64, u64); 2]> {
    measure_with(CONFIG, sp, json!({ "ulysses": ulysses }))
}

fn measure_with(model: ReferenceConfig, sp: usize, extra: serde_json::Value) -> Vec<[(u64, u64); 2]> {
    let batch = Batch::random(CONFIG.vocab_size, SEQUENCES, 64, 2);
    let problem = Problem { extra, ..problem(model, batch) };
    let global = global_batch(&problem.batch).unwrap();
    let config = problem.json_config(layout(1, sp, 0), SEQUENCES).unwrap();
    let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
        let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
        let batch = micro_batches(&global, &engine)?.remove(0);
        let before = exchanged(&engine)?;
        let loss = engine.forward(&batch)?;
        let between = exchanged(&engine)?;
        engine.backward(loss)?;
        let after = exchanged(&engine)?;
        let difference = |a: OpStats, b: OpStats| (b.calls - a.calls, b.bytes_sent - a.bytes_sent);
        Ok([difference(before, between), difference(between, after)])
    });
    ranks.unwrap()
}

/// Calls and bytes of `vectors` head vectors per sequence and layer.
fn expected(calls_per_layer: u64, vectors: u64) -> (u64, u64) {
    let layers = CONFIG.num_layers as u64;
    let vector_bytes = (CONFIG.head_dim * size_of::<f32>()) as u64;
    (calls_per_layer * layers, vectors * SEQUENCES as u64 * layers * vector_bytes)
}

#[test]
fn a_step_exchanges_the_hand_computed_bytes_in_two_calls_per_pass() {
    for (rank, measured) in measure(SP, json!({})).into_iter().enumerate() {
        assert_eq!(measured, [expected(2, FORWARD[rank]), expected(2, BACKWARD[rank])], "rank {rank}");
    }
}

#[test]
fn activation_checkpointing_repeats_the_forward_exchange_in_the_backward_pass() {
    let recomputing = json!({ "activation_checkpointing": true, "save_attention_output": false });
    for (rank, measured) in measure(SP, recomputing).into_iter().enumerate() {
        let backward = expected(4, FORWARD[rank] + BACKWARD[rank]);
        assert_eq!(measured, [expected(2, FORWARD[rank]), backward], "rank {rank}");
    }
}

#[test]
fn a_saved_attention_output_repeats_the_exchange_of_q_k_and_v_and_adds_that_of_delta() {
    // Cohere has attention and MLP side by side.
    for (family, is_bf16, element) in
        [(Family::Llama, false, 4), (Family::Llama, true, 2), (Family::Cohere, false, 4)]
    {
        // Saving is the default.
        let extra =
            json!({ "bf16": { "enabled": is_bf16 }, "ulysses": { "activation_checkpointing": true } });
        for (rank, measured) in
            measure_with(ReferenceConfig { family, ..CONFIG }, SP, extra).into_iter().enumerate()
        {
            let of_tokens = (SEQUENCES * CONFIG.num_layers) as u64;
            let bytes = |vectors: u64| vectors * of_tokens * CONFIG.head_dim as u64 * element;
            let (calls, delta) = (CONFIG.num_layers as u64, DELTA[rank] * of_tokens * 4);
            let backward = (4 * calls, bytes(QKV[rank] + BACKWARD[rank]) + delta);
            assert_eq!(
                measured,
                [(2 * calls, bytes(FORWARD[rank])), backward],
                "{family:?}, rank {rank}, {element} bytes"
            );
        }
    }
}

#[test]
fn values_of_latent_attention_travel_without_the_zeros_that_widen_them() {
    // Four heads on two ranks of 32 tokens: each sends half of its heads' vectors, and receives as many tokens of its own.
    let model =
        ReferenceConfig { family: Family::DeepseekV3, num_heads: 4, num_kv_heads: 4, head_dim: 10, ..CONFIG };
    let vectors = 32 * 2;
    let [key, value] = [10, VALUE_DIM as u64];
    let [qkv, out] = [vectors * (2 * key + value), vectors * value];
    let of_layers = (SEQUENCES * CONFIG.num_layers * size_of::<f32>()) as u64;
    let calls = CONFIG.num_layers as u64;
    for measured in measure_with(model.clone(), 2, json!({})) {
        assert_eq!(measured, [(2 * calls, of_layers * (qkv + out)); 2]);
    }
    let recomputing =
        json!({ "ulysses": { "activation_checkpointing": true, "save_attention_output": true } });
    for [_, backward] in measure_with(model, 2, recomputing) {
        assert_eq!(backward, (4 * calls, of_layers * (qkv + out + qkv + vectors)));
    }
}

#[test]
fn head_chunks_exchange_the_same_bytes_in_more_calls() {
    for (checkpointing, saves) in [(false, false), (true, false), (true, true)] {
        let of = |chunks| {
            measure(
                2,
                json!({
                    "activation_checkpointing": checkpointing, "save_attention_output": saves, "head_chunks": chunks,
                }),
            )
        };
        for (rank, (whole, chunked)) in of(1).into_iter().zip(of(2)).enumerate() {
            let in_two = whole.map(|(calls, bytes)| (2 * calls, bytes));
            assert_eq!(chunked, in_two, "rank {rank}, checkpointing {checkpointing}");
        }
    }
}

#[test]
fn passed_states_have_the_bytes_of_the_closed_form() {
    for (family, dtype, elem_bytes) in [
        (Family::Qwen35, "fp32", 4),
        (Family::Qwen35, "bf16", 2),
        (Family::GraniteHybrid, "fp32", 4),
        (Family::Lfm2, "fp32", 4),
    ] {
        let model = ReferenceConfig { family, num_layers: 3, ..CONFIG };
        let layers = llama_config(&model).layers;
        for (ring_size, ulysses_size) in [(1, 5), (2, 2), (3, 2), (5, 1)] {
            let sharding = SeqSharding { ring_size, ulysses_size };
            let ulysses = json!({ "state_passing": true, "ring_size": ring_size });
            let extra = json!({ "bf16": { "enabled": dtype == "bf16" }, "ulysses": ulysses });
            let measured = measure_with(model.clone(), sharding.sp_size(), extra);
            for (rank, measured) in measured.into_iter().enumerate() {
                let shard = SpShard { sharding, rank, batch: SEQUENCES, seq_len: 64 };
                let volumes = layers.iter().map(|layer| {
                    match ExchangeVolume::of_mixer(layer, shard, true, elem_bytes) {
                        Some(volume) => volume,
                        None if ring_size == 1 => attention_volume(rank),
                        // Over other groups than sp.
                        None => ExchangeVolume::default(),
                    }
                });
                let [forward, backward] = volumes.fold([0, 0], |[forward, backward], volume| {
                    [forward + volume.forward_elems, backward + volume.backward_elems]
                });
                assert_eq!(
                    measured.map(|(_, bytes)| bytes),
                    [forward, backward].map(|elems| elems * elem_bytes),
                    "{family:?}, {dtype}, {sharding:?}, rank {rank}"
                );
            }
        }
    }
}

/// Without a ring, each rank has one range.
#[test]
fn passed_states_go_to_all_later_ranks_and_their_gradients_to_all_earlier_ones() {
    let model = llama_config(&ReferenceConfig { family: Family::Qwen35, num_layers: 3, ..CONFIG });
    let Some(MixerConfig::LinearAttention(shape)) = model.layers.first() else { panic!("{model:?}") };
    let state = shape.num_value_heads * shape.key_head_dim * shape.value_head_dim;
    let matrix = shape.num_value_heads * shape.key_head_dim * shape.key_head_dim;
    let halo = (2 * shape.key_dim() + shape.value_dim()) * (shape.conv_width - 1);
    for rank in 0..5 {
        let shard = SpShard { sharding: SeqSharding::from(5), rank, batch: SEQUENCES, seq_len: 64 };
        let volume = ExchangeVolume::of_mixer(&(*shape).into(), shard, true, 4).unwrap();
        let elems = |receivers: usize, has_matrix: bool| {
            let matrix = if has_matrix { matrix } else { 0 };
            (SEQUENCES * (receivers * (state + matrix) + if receivers > 0 { halo } else { 0 })) as u64
        };
        assert_eq!(
            [volume.forward_elems, volume.backward_elems],
            [elems(4 - rank, rank > 0), elems(rank, rank < 4)],
            "rank {rank}"
        );
    }
}

/// The volume of attention on 1 × 5.
fn attention_volume(rank: usize) -> ExchangeVolume {
    let ReferenceConfig { num_heads, num_kv_heads, head_dim, .. } = CONFIG;
    let value_head_dim = head_dim;
    let shape =
        AttentionShape { batch: SEQUENCES, seq_len: 64, num_heads, num_kv_heads, head_dim, value_head_dim };
    ExchangePlan::new(shape, &grouped_heads(num_heads, num_kv_heads), 5, rank).unwrap().volume()
}

/// Bytes that each rank sends over its ring in a forward and in a backward pass.
fn measure_ring(ring: usize, sp: usize, batch: Batch) -> Vec<[u64; 2]> {
    let sequences = batch.num_rows();
    let problem = Problem { extra: json!({ "ulysses": { "ring_size": ring } }), ..problem(CONFIG, batch) };
    let global = global_batch(&problem.batch).unwrap();
    let config = problem.json_config(layout(1, sp, 0), sequences).unwrap();
    let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
        let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
        let batch = micro_batches(&global, &engine)?.remove(0);
        let sent = |engine: &Engine| -> Result<u64> {
            let ring = &engine.groups().ring.as_ref().expect("a ring").ring;
            ring.barrier()?;
            Ok(ring.stats().get(CollectiveOp::AllToAllStrided).bytes_sent)
        };
        let loss = engine.forward(&batch)?;
        let forward = sent(&engine)?;
        engine.backward(loss)?;
        Ok([forward, sent(&engine)? - forward])
    });
    ranks.unwrap()
}

#[test]
fn a_ring_sends_the_bytes_of_the_closed_form() {
    for (ring, ulysses) in [(2, 1), (3, 1), (4, 1), (2, 2), (3, 3)] {
        let sharding = SeqSharding { ring_size: ring, ulysses_size: ulysses };
        let batch = Batch::random(CONFIG.vocab_size, SEQUENCES, 65, 2);
        for (rank, measured) in measure_ring(ring, ring * ulysses, batch).into_iter().enumerate() {
            // Four KV heads on one rank, two on each of two; on three ranks 2, 2 and 1, as above.
            let num_kv_heads = [&[4][..], &[2, 2], &[2, 2, 1]][ulysses - 1][rank % ulysses];
            let shape = AttentionShape {
                batch: SEQUENCES,
                seq_len: 65,
                num_heads: CONFIG.num_heads,
                num_kv_heads,
                head_dim: CONFIG.head_dim,
                value_head_dim: CONFIG.head_dim,
            };
            let RingVolume { block_elems, gradient_elems } =
                RingVolume::causal(sharding, rank / ulysses, shape);
            let bytes = |elems: u64| elems * (CONFIG.num_layers * size_of::<f32>()) as u64;
            let expected = [bytes(block_elems), bytes(block_elems + gradient_elems)];
            assert_eq!(measured, expected, "ring {ring} x ulysses {ulysses}, rank {rank}");
        }
    }
}

#[test]
fn blocks_travel_only_to_ranks_that_see_them() {
    // Four ring ranks, chunks of 8 tokens: rank 0 has 0..8 and 56..64, rank 1 8..16 and 48..56, rank 2 16..24 and
    // 40..48, rank 3 24..40. Documents end at 16, 48 and 64: ranks 0 and 1 share two of them, ranks 2 and 3 one.
    // So every block is sent once: ranks 0 and 1 exchange theirs, and ranks 2 and 3.
    let batch = Batch::packed(CONFIG.vocab_size, &[&[16, 32, 16]], 3);
    let block = 2 * 16 * CONFIG.num_kv_heads * CONFIG.head_dim * CONFIG.num_layers * size_of::<f32>();
    // Backward again, and the gradients of the block that the rank saw.
    for (rank, sent) in measure_ring(4, 4, batch).into_iter().enumerate() {
        assert_eq!(sent, [block as u64, 2 * block as u64], "rank {rank}");
    }
    // With a document for every chunk, no block travels.
    let aligned = Batch::packed(CONFIG.vocab_size, &[&[8; 8]], 3);
    assert_eq!(measure_ring(4, 4, aligned), [[0, 0]; 4]);
}
