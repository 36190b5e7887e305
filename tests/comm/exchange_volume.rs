//! Bytes of the engine's Ulysses exchanges in a real step, compared with values computed by hand.

use crate::support::mesh_run::{Problem, global_batch, layout, micro_batches, on_mesh};
use crate::support::problems::{CONFIG, problem};
use crate::support::reference::Batch;
use anyhow::Result;
use serde_json::json;
use std::sync::Arc;
use ulysses::comm::thread::LaunchOptions;
use ulysses::comm::{CollectiveOp, OpStats, ProcessGroupExt};
use ulysses::engine::Engine;
use ulysses::kernels::attention::FlashAttention;

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

const SEQUENCES: usize = 2;

#[test]
fn the_volumes_of_the_plan_match_hand_computed_ones() {
    assert_eq!(FORWARD, [368, 360, 380]);
    assert_eq!(BACKWARD, [404, 406, 298]);
}

/// The exchange counters of this rank, after all peers have read its data.
fn exchanged(engine: &Engine) -> Result<OpStats> {
    engine.sp_group().barrier()?;
    Ok(engine.sp_group().stats().get(CollectiveOp::AllToAllStrided))
}

/// Calls and bytes that each rank sends in a forward and in a backward pass.
fn measure(sp: usize, ulysses: serde_json::Value) -> Vec<[(u64, u64); 2]> {
    let batch = Batch::random(CONFIG.vocab_size, SEQUENCES, 64, 2);
    let extra = serde_json::json!({ "ulysses": ulysses });
    let problem = Problem { extra, ..problem(CONFIG, batch) };
    let global = global_batch(&problem.batch).unwrap();
    let config = problem.json_config(layout(1, sp, 0), SEQUENCES).unwrap();
    let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
        let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention))?;
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
    for (rank, measured) in measure(SP, json!({ "activation_checkpointing": true })).into_iter().enumerate() {
        let backward = expected(4, FORWARD[rank] + BACKWARD[rank]);
        assert_eq!(measured, [expected(2, FORWARD[rank]), backward], "rank {rank}");
    }
}

#[test]
fn head_chunks_exchange_the_same_bytes_in_more_calls() {
    for checkpointing in [false, true] {
        let of =
            |chunks| measure(2, json!({ "activation_checkpointing": checkpointing, "head_chunks": chunks }));
        for (rank, (whole, chunked)) in of(1).into_iter().zip(of(2)).enumerate() {
            let in_two = whole.map(|(calls, bytes)| (2 * calls, bytes));
            assert_eq!(chunked, in_two, "rank {rank}, checkpointing {checkpointing}");
        }
    }
}
