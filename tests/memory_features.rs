//! What saves memory changes nothing else: every feature against a run without it, on the same mesh.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::compare::{assert_all_close, assert_scalar_close};
use support::mesh_run::{Layout, Problem, Rule, bits, by_name, layout};
use support::problems::{CONFIG, main_problem, packed_batch, problem};
use support::reference::ReferenceConfig;
use ulysses::engine::BatchOutcome;

/// Sums in another order, relative to a tensor's largest entry: half of what the suite allows a run against the f64
/// reference. Most stay below 2e-6; the norm over heads of four elements divides by small roots and reaches 5e-6.
const REORDERED: f64 = 1e-5;

fn run(problem: &Problem, extra: Value, layout: Layout) -> BatchOutcome {
    let problem = Problem { extra, ..problem.clone() };
    problem.run(layout).unwrap()
}

/// Uneven shards and heads, replicas, partitioned parameters, accumulation.
fn layouts() -> impl Iterator<Item = Layout> {
    let meshes = [(1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (1, 4)];
    let once = meshes.into_iter().flat_map(|(dp, sp)| [0, 3].map(|stage| layout(dp, sp, stage)));
    once.chain([Layout { dp: 2, sp: 2, stage: 2, accumulation: 2 }])
}

/// Packed documents; a shard without a label; families with biases, with norms of heads and with a window.
fn problems() -> Vec<Problem> {
    let sgd = Rule::Sgd { lr: 0.1 };
    let with = |config| Problem { rule: sgd, ..problem(config, packed_batch()) };
    vec![
        main_problem(sgd, Some(0.25)),
        Problem { rule: sgd, ..problem(CONFIG, packed_batch().mask_tokens(8..15)) },
        with(ReferenceConfig { qkv_bias: true, num_kv_heads: 8, ..CONFIG }),
        with(ReferenceConfig { qk_norm: true, ..CONFIG }),
        with(ReferenceConfig { sliding_window: Some(5), tie_word_embeddings: true, ..CONFIG }),
    ]
}

fn assert_same_bits(features: &Value, without: &Value) {
    for (number, problem) in problems().iter().enumerate() {
        for layout in layouts() {
            let outcomes = [without, features].map(|extra| run(problem, extra.clone(), layout));
            let [expected, got] = outcomes.map(|outcome| bits(&outcome).unwrap());
            assert!(expected == got, "problem {number}, {layout:?}: {features} changes bits");
        }
    }
}

fn assert_close_to_plain(features: &Value, layouts: impl Iterator<Item = Layout>) {
    let layouts: Vec<_> = layouts.collect();
    for (number, problem) in problems().into_iter().enumerate() {
        // One step: later ones would compare what updates make of the difference.
        let problem = &Problem { steps: 1, ..problem };
        for &layout in &layouts {
            let (plain, got) = (run(problem, json!({}), layout), run(problem, features.clone(), layout));
            let label = format!("problem {number}, {layout:?}, {features}");
            for (got, plain) in got.reports.iter().zip(&plain.reports) {
                assert_scalar_close(&format!("{label}: loss"), got.loss, plain.loss, REORDERED);
                assert_scalar_close(&format!("{label}: norm"), got.grad_norm, plain.grad_norm, REORDERED);
            }
            let close = |what: &str, got: &[_], plain: &[_]| {
                assert_all_close(&format!("{label}: {what}"), &by_name(got), &by_name(plain), REORDERED);
            };
            close("gradient", &got.gradients, &plain.gradients);
            close("parameter", &got.parameters, &plain.parameters);
        }
    }
}

#[test]
fn recomputing_all_or_every_other_layer_does_not_change_a_bit() {
    for interval in [1, 2, 3] {
        let recomputing = json!({ "ulysses": {
            "activation_checkpointing": true, "activation_checkpointing_interval": interval,
        } });
        assert_same_bits(&recomputing, &json!({}));
    }
}

#[test]
fn checkpoints_that_wait_in_a_file_come_back_to_the_bit() {
    for chunks in [1, 2] {
        let ulysses = json!({ "activation_checkpointing": true, "head_chunks": chunks, "tile_tokens": 9 });
        let offloading =
            json!({ "ulysses": ulysses, "activation_checkpointing": { "cpu_checkpointing": true } });
        assert_same_bits(&offloading, &json!({ "ulysses": ulysses }));
    }
}

#[test]
fn tiles_that_do_not_divide_the_tokens_change_only_the_order_of_sums() {
    for (tile, checkpointing) in [(1, false), (5, false), (5, true), (1000, false)] {
        let features =
            json!({ "ulysses": { "tile_tokens": tile, "activation_checkpointing": checkpointing } });
        assert_close_to_plain(&features, layouts());
    }
}

#[test]
fn one_tile_of_all_tokens_does_not_change_a_bit() {
    let tiled = json!({ "ulysses": { "tile_tokens": 1000 } });
    assert_same_bits(&tiled, &json!({}));
}

#[test]
fn chunks_of_heads_change_only_the_order_of_sums() {
    for (chunks, max_sp) in [(2, 4), (3, 2), (4, 2)] {
        for checkpointing in [false, true] {
            let features =
                json!({ "ulysses": { "head_chunks": chunks, "activation_checkpointing": checkpointing } });
            assert_close_to_plain(&features, layouts().filter(|layout| layout.sp <= max_sp));
        }
    }
}

#[test]
fn recomputing_chunks_of_heads_in_tiles_does_not_change_a_bit() {
    let chunked = |checkpointing| {
        json!({ "ulysses": {
            "head_chunks": 2, "tile_tokens": 7, "activation_checkpointing": checkpointing,
        } })
    };
    assert_same_bits(&chunked(true), &chunked(false));
}
