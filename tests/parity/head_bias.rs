//! An output projection with a bias (Phi, GPT-J) against the independent f64 reference, on every mesh.

use crate::support::compare::{assert_close, values};
use crate::support::features::{GRID, check_features};
use crate::support::mesh_run::{Layout, Problem, assert_matches, by_name, layout};
use crate::support::problems::{CONFIG, packed_batch, problem};
use crate::support::reference::{Family, ReferenceConfig, forward};
use candle_core::Tensor;
use serde_json::{Value, json};

/// Phi with attention of grouped heads, of which half rotates.
const WITH_BIAS: ReferenceConfig =
    ReferenceConfig { family: Family::Phi, partial_rotary_factor: 0.5, hidden_size: 32, ..CONFIG };

/// Packed documents on uneven shards. The bias of keys that do not rotate has a gradient of 0, whose rounding AdamW would magnify.
fn with_bias(ulysses: &Value) -> Problem {
    let extra = json!({ "ulysses": ulysses });
    Problem { extra, clip: Some(0.25), ..problem(WITH_BIAS, packed_batch()) }
}

#[test]
fn a_bias_in_the_head_is_the_same_on_every_mesh_with_and_without_features() {
    let features = [
        json!({}),
        json!({ "loss_tile_tokens": 5 }),
        json!({ "activation_checkpointing": true, "loss_tile_tokens": 3 }),
        json!({ "tile_tokens": 5, "head_chunks": 2, "overlap_exchange": true }),
    ];
    check_features(&features.each_ref().map(with_bias), GRID.layouts());
}

#[test]
fn biases_of_tied_heads_and_of_masked_shards_have_the_scale_of_one_rank() {
    let tied = ReferenceConfig { tie_word_embeddings: true, ..WITH_BIAS };
    let interleaved = ReferenceConfig { family: Family::GptJ, num_kv_heads: CONFIG.num_heads, ..WITH_BIAS };
    // With sp 3 the shards are 0..8, 8..15 and 15..22.
    let problems = [
        problem(tied.clone(), packed_batch()),
        problem(WITH_BIAS, packed_batch().mask_tokens(8..15)),
        problem(tied, packed_batch().mask_rows(4..8)),
        problem(interleaved, packed_batch().mask_tokens(0..9)),
    ];
    for problem in problems {
        let extra = json!({ "ulysses": { "loss_tile_tokens": 7 } });
        let sgd = Problem { clip: Some(0.25), extra, ..problem };
        let expected = sgd.reference().unwrap();
        for layout in [
            layout(1, 1, 0),
            layout(2, 3, 3),
            Layout { tp: 2, ..layout(2, 2, 2) },
            Layout { tp: 3, ..layout(1, 1, 1) },
            Layout { pp: 2, ..layout(1, 3, 1) },
            Layout { ring: 2, tp: 2, ..layout(1, 2, 2) },
        ] {
            assert_matches(
                &sgd.run(layout).unwrap(),
                &expected,
                2e-5,
                &format!("{:?}, {layout:?}", sgd.config),
            );
        }
    }
}

#[test]
fn logits_have_the_bias_of_the_head() {
    let problem = Problem { steps: 1, ..with_bias(&json!({})) };
    let expected = forward(&problem.config, &problem.weights, &problem.batch).unwrap().logits;
    let expected = Tensor::cat(&expected, 0).unwrap();
    for layout in [layout(1, 1, 0), layout(1, 3, 3), Layout { tp: 3, ..layout(1, 1, 0) }] {
        let outcome = problem.run(layout).unwrap();
        assert_close(&format!("logits on {layout:?}"), &values(&outcome.logits), &expected, 2e-5);
        assert!(by_name(&outcome.gradients).contains_key("lm_head.bias"));
    }
}
