//! Hybrid models of Mamba 2 and attention (Granite 4) against the independent f64 reference: state and convolution see whole
//! documents on every mesh, and nothing else.

use crate::support::features::{GRID, check_features_where};
use crate::support::mesh_run::{Layout, Problem, Rule, assert_matches, layout};
use crate::support::problems::{ADAMW, CONFIG, packed_batch, problem};
use crate::support::reference::{Family, ReferenceConfig};
use serde_json::{Value, json};

/// Two layers with Mamba 2 of four heads, one with attention.
const HYBRID: ReferenceConfig =
    ReferenceConfig { family: Family::GraniteHybrid, num_layers: 3, tie_word_embeddings: true, ..CONFIG };

/// Packed documents, some shorter than the convolution, on uneven shards; with sp 5 a rank has no head of Mamba 2. `qkv_bias`: two
/// groups, and biases of the projections.
fn hybrid(qkv_bias: bool, ulysses: Value) -> Problem {
    let extra = json!({ "ulysses": ulysses });
    let config = ReferenceConfig { qkv_bias, ..HYBRID };
    Problem { rule: Rule::AdamW(ADAMW), extra, ..problem(config, packed_batch()) }
}

#[test]
fn mamba_2_is_the_same_on_every_mesh_with_and_without_features() {
    let recompute = |saves: bool| json!({ "activation_checkpointing": true, "save_attention_output": saves });
    let tiles = || json!({ "tile_tokens": 5, "head_chunks": 2, "overlap_exchange": true });
    let problems = [
        hybrid(false, json!({})),
        hybrid(true, json!({})),
        hybrid(false, recompute(false)),
        hybrid(true, recompute(true)),
        hybrid(false, tiles()),
        hybrid(true, tiles()),
    ];
    // Two groups of heads are divided over two ranks.
    let fits = |problem: &Problem, layout: &Layout| !problem.config.qkv_bias || layout.tp <= 2;
    check_features_where(&problems, GRID.layouts(), 5e-5, fits);
}

#[test]
fn the_gradients_of_mamba_2_have_the_scale_of_one_rank_with_sgd_and_clipping() {
    assert_gradients(&[layout(1, 1, 0), layout(2, 3, 3), layout(1, 5, 2)]);
}

#[test]
fn a_ring_divided_over_tp_has_the_gradients_of_one_rank() {
    assert_gradients(&[Layout { ring: 2, tp: 2, ..layout(1, 2, 2) }]);
}

fn assert_gradients(layouts: &[Layout]) {
    let sgd = Problem { rule: Rule::Sgd { lr: 0.1 }, clip: Some(0.25), ..hybrid(true, json!({})) };
    let expected = sgd.reference().unwrap();
    for layout in layouts {
        assert_matches(&sgd.run(*layout).unwrap(), &expected, 2e-5, &format!("{layout:?}"));
    }
}

#[test]
fn more_ranks_of_tp_than_groups_of_heads_are_refused_by_name() {
    let error =
        format!("{:#}", hybrid(true, json!({})).run(Layout { tp: 3, ..layout(1, 1, 0) }).unwrap_err());
    assert!(error.contains("layer model.layers.0") && error.contains("tp of 1 to 2 is valid"), "{error}");
}
