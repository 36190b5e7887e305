//! Layers of one branch (Nemotron-H) against the independent f64 reference: Mamba 2, attention or an MLP alone, on every mesh.

use crate::support::features::{GRID, Grid, check_features};
use crate::support::mesh_run::{Layout, Problem, Rule, assert_matches, layout};
use crate::support::problems::{ADAMW, CONFIG, packed_batch, problem};
use crate::support::reference::{Family, ReferenceConfig};
use serde_json::{Value, json};

/// Mamba 2 of four heads, an MLP, attention, an MLP.
const HYBRID: ReferenceConfig = ReferenceConfig { family: Family::NemotronH, num_layers: 4, ..CONFIG };

/// Packed documents, some shorter than the convolution, on uneven shards.
fn hybrid(extra: Value) -> Problem {
    Problem { rule: Rule::AdamW(ADAMW), extra, clip: Some(0.25), ..problem(HYBRID, packed_batch()) }
}

#[test]
fn layers_of_one_branch_are_the_same_on_every_mesh_with_and_without_features() {
    let recompute = |saves: bool, head_chunks: usize| json!({ "activation_checkpointing": true, "save_attention_output": saves, "head_chunks": head_chunks });
    let tiles = json!({ "tile_tokens": 5, "head_chunks": 2, "overlap_exchange": true });
    let recomputed =
        [(false, 1), (true, 1), (false, 2), (true, 2)].map(|(saves, chunks)| recompute(saves, chunks));
    let features =
        [json!({}), tiles].into_iter().chain(recomputed).map(|ulysses| json!({ "ulysses": ulysses }));
    let offloaded = json!({
        "ulysses": { "activation_checkpointing": true, "tile_tokens": 3 },
        "activation_checkpointing": { "cpu_checkpointing": true },
    });
    let problems: Vec<_> = features.chain([offloaded]).map(hybrid).collect();
    // Of four stages, two have an MLP alone.
    let pipelines = &[(1, 1, 2), (2, 1, 2), (1, 3, 2), (1, 1, 4), (1, 2, 4)];
    check_features(&problems, Grid { pipelines, ..GRID }.layouts());
}

#[test]
fn groups_and_biases_are_divided_and_gradients_have_the_scale_of_one_rank() {
    // Heads that do not rotate may have an odd size.
    let config = ReferenceConfig { qkv_bias: true, intermediate_size: 41, head_dim: 5, ..HYBRID };
    let mut sgd =
        Problem { rule: Rule::Sgd { lr: 0.1 }, clip: Some(0.25), ..problem(config, packed_batch()) };
    let expected = sgd.reference().unwrap();
    for recomputed in [false, true] {
        sgd.extra = json!({ "ulysses": { "activation_checkpointing": recomputed } });
        for layout in [
            layout(1, 1, 0),
            layout(2, 3, 3),
            Layout { pp: 2, ..layout(1, 2, 1) },
            Layout { ring: 2, tp: 2, ..layout(1, 2, 2) },
        ] {
            let label = format!("{layout:?}, recomputed: {recomputed}");
            assert_matches(&sgd.run(layout).unwrap(), &expected, 2e-5, &label);
        }
    }
}
