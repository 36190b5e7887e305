//! Hybrid models of linear attention (Gated DeltaNet) and attention with a gate, or of Kimi Delta Attention and latent attention, against
//! the independent f64 reference: state and convolution see whole documents on every mesh, and nothing else.

use crate::support::compare::rms_error;
use crate::support::features::check_features;
use crate::support::mesh_run::{Layout, Problem, Rule, assert_matches, by_name, layout};
use crate::support::problems::{ADAMW, CONFIG, packed_batch, problem};
use crate::support::reference::{Family, ReferenceConfig};
use serde_json::{Value, json};

/// Two layers with linear attention of two key and four value heads, one with attention. Half of its heads rotates.
const HYBRID: ReferenceConfig =
    ReferenceConfig { family: Family::Qwen35, num_layers: 3, partial_rotary_factor: 0.5, ..CONFIG };

/// Two layers with linear attention of four heads, one with latent attention without positions. Of heads that are close to 0, a smaller
/// epsilon would multiply the rounding.
pub(super) const KIMI: ReferenceConfig = ReferenceConfig {
    family: Family::KimiLinear,
    num_layers: 3,
    num_kv_heads: 8,
    head_dim: 10,
    rms_norm_eps: 1e-2,
    ..CONFIG
};

/// As [`HYBRID`], with projections by key head, of which there are three.
pub(super) const NEXT: ReferenceConfig =
    ReferenceConfig { family: Family::Qwen3Next, rms_norm_eps: 1e-2, ..HYBRID };

/// Packed documents, some shorter than the convolution, on uneven shards; with sp 5 or 6 a rank has no head of linear attention.
fn hybrid(extra: Value) -> Problem {
    hybrid_of(HYBRID, extra)
}

fn hybrid_of(config: ReferenceConfig, extra: Value) -> Problem {
    Problem { rule: Rule::AdamW(ADAMW), extra, ..problem(config, packed_batch()) }
}

fn layouts() -> impl Iterator<Item = Layout> {
    let meshes = [(1, 1), (2, 1), (1, 2), (1, 3), (2, 2), (1, 4), (1, 5)];
    let with_stages = meshes.into_iter().flat_map(|(dp, sp)| [0, 2, 3].map(|stage| layout(dp, sp, stage)));
    let pipelines = [(1, 1), (2, 1), (1, 2), (1, 3)].map(|(dp, sp)| Layout { pp: 2, ..layout(dp, sp, 1) });
    let rings = [(2, 2), (2, 4), (3, 3), (3, 6), (4, 4)];
    let rings = rings.into_iter().flat_map(|(ring, sp)| {
        let on_ring = Layout { ring, ..layout(1, sp, 3) };
        [on_ring, Layout { ring, ..layout(if sp <= 4 { 2 } else { 1 }, sp, 1) }]
    });
    // Of three ranks of tp two share a key head, of four all do. Then some ranks of sp have no head of linear attention.
    let on_tp = |dp, sp, tp, stage| Layout { tp, ..layout(dp, sp, stage) };
    let tensor_parallel = [
        on_tp(1, 1, 2, 0),
        on_tp(2, 1, 2, 3),
        on_tp(1, 2, 2, 1),
        on_tp(2, 2, 2, 2),
        on_tp(1, 1, 3, 1),
        on_tp(1, 2, 3, 3),
        on_tp(2, 1, 3, 0),
        on_tp(1, 1, 4, 3),
        on_tp(1, 2, 4, 0),
        Layout { ring: 2, ..on_tp(1, 2, 2, 3) },
        Layout { ring: 2, ..on_tp(1, 4, 2, 2) },
        Layout { pp: 2, ..on_tp(1, 1, 3, 2) },
        Layout { pp: 2, ring: 2, ..on_tp(1, 2, 2, 1) },
    ];
    let ring_in_pipeline = Layout { pp: 2, ring: 2, ..layout(1, 2, 2) };
    with_stages
        .chain(pipelines)
        .chain(rings)
        .chain(tensor_parallel)
        .chain([ring_in_pipeline])
        .flat_map(|layout| [1, 2].map(|accumulation| Layout { accumulation, ..layout }))
}

#[test]
fn linear_attention_is_the_same_on_every_mesh_with_and_without_features() {
    let recompute = |saves: bool| json!({ "activation_checkpointing": true, "save_attention_output": saves });
    let tiles = json!({ "tile_tokens": 5, "head_chunks": 2, "overlap_exchange": true });
    let chunks = json!({ "activation_checkpointing": true, "head_chunks": 2, "overlap_exchange": true });
    let kept = json!({ "activation_checkpointing": true, "save_attention_output": true, "head_chunks": 2 });
    let features = [json!({}), recompute(false), recompute(true), tiles, chunks, kept];
    check_features(&features.map(|ulysses| hybrid(json!({ "ulysses": ulysses }))), layouts());
}

/// Ranks of tp divide the parameters by key head or, if there are four ranks, use some of their rows.
#[test]
fn projections_by_key_head_are_the_same_on_every_mesh() {
    let features = [json!({}), json!({ "activation_checkpointing": true, "tile_tokens": 5 })];
    // AdamW's first steps follow the signs of gradients, also of some that are rounding with these weights.
    let problems = features.map(|ulysses| {
        let problem = hybrid_of(NEXT, json!({ "ulysses": ulysses }));
        Problem { rule: Rule::Sgd { lr: 0.1 }, clip: Some(0.25), ..problem }
    });
    check_features(&problems, layouts());
}

#[test]
fn decays_per_channel_are_the_same_on_every_mesh_with_and_without_features() {
    let recompute = |saves: bool| json!({ "activation_checkpointing": true, "save_attention_output": saves });
    let features = [json!({}), recompute(false), recompute(true), json!({ "tile_tokens": 5 })];
    let problems = features.map(|ulysses| hybrid_of(KIMI, json!({ "ulysses": ulysses })));
    check_features(&problems, layouts());
}

#[test]
fn the_gradients_of_linear_attention_have_the_scale_of_one_rank_with_sgd_and_clipping() {
    for config in [HYBRID, KIMI] {
        let sgd =
            Problem { rule: Rule::Sgd { lr: 0.1 }, clip: Some(0.25), ..hybrid_of(config.clone(), json!({})) };
        let expected = sgd.reference().unwrap();
        let divided = Layout { ring: 2, tp: 2, ..layout(1, 2, 2) };
        for layout in [layout(1, 1, 0), layout(2, 3, 3), layout(1, 5, 2), divided] {
            let context = format!("{:?}, {layout:?}", config.family);
            assert_matches(&sgd.run(layout).unwrap(), &expected, 5e-5, &context);
        }
    }
}

#[test]
fn more_ranks_than_value_heads_are_refused_by_name() {
    // Eight query heads, but four value heads in the linear layers.
    let error = format!("{:#}", hybrid(json!({})).run(Layout { tp: 5, ..layout(1, 1, 0) }).unwrap_err());
    assert!(error.contains("layer model.layers.0") && error.contains("tp of 1 to 4 is valid"), "{error}");
}

#[test]
fn bf16_is_as_exact_on_meshes_as_on_one_rank() {
    let config = ReferenceConfig { num_layers: 2, ..HYBRID };
    let extra = json!({ "bf16": { "enabled": true } });
    let half = Problem { steps: 1, extra, ..problem(config, packed_batch()) };
    let expected = half.reference().unwrap();
    let error = |layout| rms_error(&by_name(&half.run(layout).unwrap().gradients), &expected.steps[0].grads);
    let alone = error(layout(1, 1, 0));
    // 8 bits of mantissa. Outputs of heads that are close to 0 before their norm multiply the rounding of queries and keys.
    assert!(alone < 0.1, "{alone}");
    for layout in [layout(1, 3, 3), layout(2, 2, 2)] {
        let error = error(layout);
        assert!(error < 1.3 * alone, "{layout:?}: {error}, alone {alone}");
    }
}
