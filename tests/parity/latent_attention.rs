//! Latent attention against the independent f64 reference, on every mesh.

use crate::support::features::{GRID, Grid, check_features};
use crate::support::mesh_run::{Layout, Problem, Rule, assert_matches, layout};
use crate::support::problems::{ADAMW, CONFIG, packed_batch, problem};
use crate::support::reference::{Family, ReferenceConfig, RopeScaling};
use serde_json::{Value, json};

/// Queries with a latent, neighbors that rotate as pairs, and a factor on the logits that depends on the scaling.
const DEEPSEEK: ReferenceConfig = ReferenceConfig {
    family: Family::DeepseekV3,
    num_heads: 4,
    num_kv_heads: 4,
    head_dim: 10,
    // Not that of the norms of latents.
    rms_norm_eps: 1e-2,
    rope_theta: 100.0,
    rope_scaling: RopeScaling::Yarn { factor: 4.0, original: 12 },
    ..CONFIG
};

/// Packed documents on uneven shards.
fn deepseek(extra: Value) -> Problem {
    Problem { rule: Rule::AdamW(ADAMW), extra, clip: Some(0.25), ..problem(DEEPSEEK, packed_batch()) }
}

/// With rings there are more ranks than heads.
const LAYOUTS: Grid = Grid {
    meshes: &[(1, 1), (2, 1), (1, 2), (1, 3), (2, 2), (1, 4), (2, 3)],
    divided: &[(1, 1, 2), (1, 2, 2), (2, 1, 3), (1, 1, 3), (1, 1, 4)],
    rings: &[(2, 2, 1), (2, 4, 1), (3, 3, 1), (5, 5, 1), (3, 6, 1), (2, 2, 2), (2, 2, 3)],
    ..GRID
};

#[test]
fn latent_attention_is_the_same_on_every_mesh_with_and_without_features() {
    let features = [
        json!({}),
        json!({ "tile_tokens": 5 }),
        json!({ "activation_checkpointing": true, "save_attention_output": false }),
        json!({ "activation_checkpointing": true, "save_attention_output": true, "tile_tokens": 7 }),
    ];
    let features = features.map(|ulysses| json!({ "ulysses": ulysses }));
    let offloaded = json!({
        "ulysses": { "activation_checkpointing": true },
        "activation_checkpointing": { "cpu_checkpointing": true },
    });
    let problems: Vec<_> = features.into_iter().chain([offloaded]).map(deepseek).collect();
    check_features(&problems, LAYOUTS.layouts());
}

#[test]
fn gradients_of_latents_have_the_scale_of_one_rank() {
    for (family, num_heads) in
        [(Family::DeepseekV3, 4), (Family::DeepseekV2, 3), (Family::Youtu, 5), (Family::MiniCpm3, 4)]
    {
        let config = ReferenceConfig { family, num_heads, num_kv_heads: num_heads, ..DEEPSEEK };
        let mut sgd =
            Problem { rule: Rule::Sgd { lr: 0.1 }, clip: Some(0.25), ..problem(config, packed_batch()) };
        let expected = sgd.reference().unwrap();
        for (layout, recomputes) in [
            (layout(1, 1, 0), false),
            (layout(2, 3, 3), true),
            (Layout { tp: 3, ..layout(1, 1, 1) }, false),
            (Layout { tp: 2, pp: 2, ..layout(1, 1, 1) }, true),
            (Layout { ring: 5, ..layout(1, 5, 2) }, false),
        ] {
            sgd.extra = json!({ "ulysses": { "activation_checkpointing": recomputes } });
            let label = format!("{family:?}, {layout:?}, recomputed: {recomputes}");
            assert_matches(&sgd.run(layout).unwrap(), &expected, 2e-5, &label);
        }
    }
}

#[test]
fn head_chunks_of_latent_attention_are_refused() {
    let error = deepseek(json!({ "ulysses": { "head_chunks": 2 } })).run(layout(1, 1, 0)).err().unwrap();
    let message = format!("{error:#}");
    assert!(message.contains("head_chunks") && message.contains("1 to 1"), "{message}");
}
