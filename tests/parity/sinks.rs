//! Attention with sinks (gpt-oss) against the independent f64 reference on every mesh, and against transformers.

use crate::support::compare::{assert_close, rms_error, values};
use crate::support::features::check_features;
use crate::support::golden::repository;
use crate::support::mesh_run::{Layout, Problem, Rule, assert_matches, by_name, layout, llama, matches};
use crate::support::problems::{ADAMW, CONFIG, packed_batch, problem};
use crate::support::reference::{Family, ReferenceConfig, load_tensors};
use crate::support::sink_doubles::{SinkFault, with_fault};
use serde_json::{Value, json};
use ulysses::kernels::Workspace;
use ulysses::kernels::attention::{Attention, AttentionLayout, FlashAttention, QkvGradients, Sinks};
use ulysses::kernels::tensor::TensorOptions;
use ulysses::model::ModelConfig;

/// Three layers, of which the first and the last have a window.
const WITH_SINKS: ReferenceConfig =
    ReferenceConfig { family: Family::GptOss, num_layers: 3, sliding_window: Some(6), ..CONFIG };

/// Packed documents on uneven shards.
fn with_sinks(extra: Value) -> Problem {
    Problem { rule: Rule::AdamW(ADAMW), extra, ..problem(WITH_SINKS, packed_batch()) }
}

fn layouts() -> impl Iterator<Item = Layout> {
    let meshes = [(1, 1), (2, 1), (1, 2), (1, 3), (2, 2), (1, 5)];
    let with_stages = meshes.into_iter().flat_map(|(dp, sp)| [0, 2, 3].map(|stage| layout(dp, sp, stage)));
    let rings = [(2, 2), (2, 4), (3, 3)].map(|(ring, sp)| Layout { ring, ..layout(1, sp, 3) });
    let on_tp = |dp, sp, tp, stage| Layout { tp, ..layout(dp, sp, stage) };
    let tensor_parallel =
        [on_tp(1, 1, 2, 0), on_tp(2, 2, 2, 3), on_tp(1, 2, 3, 1), Layout { ring: 2, ..on_tp(1, 2, 2, 2) }];
    let pipeline = [Layout { pp: 2, ..layout(1, 2, 1) }];
    let all = with_stages.chain(rings).chain(tensor_parallel).chain(pipeline);
    all.flat_map(|layout| [1, 2].map(|accumulation| Layout { accumulation, ..layout }))
}

#[test]
fn sinks_are_the_same_on_every_mesh_with_and_without_features() {
    let recompute = |saves: bool| json!({ "activation_checkpointing": true, "save_attention_output": saves });
    let chunks = |recomputes: bool, saves: bool| {
        json!({
            "head_chunks": 2, "overlap_exchange": true, "tile_tokens": 5,
            "activation_checkpointing": recomputes, "save_attention_output": saves,
        })
    };
    let features = [
        json!({}),
        recompute(false),
        recompute(true),
        chunks(false, false),
        chunks(true, false),
        chunks(true, true),
    ];
    check_features(&features.map(|ulysses| with_sinks(json!({ "ulysses": ulysses }))), layouts());
}

#[test]
fn sinks_of_few_or_uneven_heads_and_of_masked_shards_are_the_same_on_every_mesh() {
    let with_heads = |num_heads, num_kv_heads| ReferenceConfig { num_heads, num_kv_heads, ..WITH_SINKS };
    // With sp 3 the shards are 0..8, 8..15 and 15..22.
    let cases = [
        (problem(with_heads(5, 5), packed_batch()), layout(1, 3, 0)),
        (problem(with_heads(2, 1), packed_batch()), Layout { ring: 4, ..layout(1, 4, 3) }),
        (problem(with_heads(2, 2), packed_batch()), Layout { ring: 3, ..layout(1, 6, 1) }),
        (problem(WITH_SINKS, packed_batch().mask_tokens(8..15)), layout(2, 3, 3)),
        (problem(WITH_SINKS, packed_batch().mask_rows(4..8)), layout(2, 2, 2)),
    ];
    for (problem, layout) in cases {
        let clipped = Problem { clip: Some(0.25), ..problem };
        let expected = clipped.reference().unwrap();
        assert_matches(&clipped.run(layout).unwrap(), &expected, 2e-5, &format!("{layout:?}"));
    }
}

#[test]
fn bf16_is_as_exact_on_meshes_as_on_one_rank() {
    let half = Problem { steps: 1, ..with_sinks(json!({ "bf16": { "enabled": true } })) };
    let expected = half.reference().unwrap();
    let error = |layout| rms_error(&by_name(&half.run(layout).unwrap().gradients), &expected.steps[0].grads);
    let alone = error(layout(1, 1, 0));
    // 8 bits of mantissa.
    assert!(alone < 0.03, "{alone}");
    for layout in [layout(1, 3, 3), Layout { ring: 2, ..layout(1, 2, 0) }] {
        let error = error(layout);
        assert!(error < 1.3 * alone, "{layout:?}: {error}, alone {alone}");
    }
}

#[test]
fn faults_of_sinks_and_a_lost_window_are_detected() {
    use SinkFault::{GradientTwice, LeftOut, NoGradient, None, OncePerHop};
    let without_window = |config: &ModelConfig| {
        let mut config = config.clone();
        config.attention_layers_mut().next().unwrap().window = Option::None;
        llama(&config)
    };
    let faulty: [fn(&ModelConfig) -> _; 5] = [
        |config| with_fault(config, LeftOut),
        |config| with_fault(config, OncePerHop),
        |config| with_fault(config, NoGradient),
        |config| with_fault(config, GradientTwice),
        without_window,
    ];
    let sgd = problem(WITH_SINKS, packed_batch());
    let expected = sgd.reference().unwrap();
    let ring = Layout { ring: 2, ..layout(1, 2, 0) };
    let is_accepted = |model: fn(&ModelConfig) -> _| {
        matches(&Problem { model, ..sgd.clone() }.run(ring).unwrap(), &expected, 2e-5)
    };
    assert!(is_accepted(|config| with_fault(config, None)));
    for (number, model) in faulty.into_iter().enumerate() {
        assert!(!is_accepted(model), "fault {number}");
    }
}

#[test]
fn attention_with_sinks_is_that_of_transformers() {
    let file = repository().join("tests/fixtures/golden/sinks.safetensors");
    let tensors = load_tensors(&file).unwrap();
    let [q, k, v, sinks, dout] = ["q", "k", "v", "sinks", "dout"].map(|name| tensors[name].clone());
    let gradient = sinks.zeros_like().unwrap();
    // Those of the script: six query heads of three KV heads, a window of 11 tokens.
    let layout = AttentionLayout::causal(2, 37, vec![0, 0, 1, 1, 2, 2]).unwrap();
    let layout = layout.masked(layout.q_to_kv().clone(), Some(11), None).unwrap();
    let layout = layout.with_sinks(Some(Sinks { logits: sinks, gradient: Some(gradient.clone()) }));
    let workspace = Workspace::with_options(TensorOptions { device: q.device().clone(), dtype: q.dtype() });
    let attention = FlashAttention::default();
    let (o, saved) = attention.forward(q, k, v, &layout, &workspace).unwrap();
    let output = values(&o);
    drop(o);
    let QkvGradients { dq, dk, dv } = attention.backward(saved, &dout, &layout, &workspace).unwrap();
    assert_close("o", &output, &tensors["o"], 2e-6);
    for (name, got) in [("dq", dq), ("dk", dk), ("dv", dv), ("dsinks", gradient)] {
        assert_close(name, &values(&got), &tensors[name], 2e-6);
    }
}
