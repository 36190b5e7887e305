//! Gated short convolutions (LFM2) against the independent f64 reference: on every mesh they see whole documents, and nothing
//! else.

use crate::support::features::{GRID, check_features_where};
use crate::support::mesh_run::Problem;
use crate::support::problems::{CONFIG, packed_batch, problem};
use crate::support::reference::{Batch, Family, ReferenceConfig};
use serde_json::{Value, json};

/// Two layers with convolutions of 24 channels and three taps, one with attention.
const HYBRID: ReferenceConfig =
    ReferenceConfig { family: Family::Lfm2, num_layers: 3, tie_word_embeddings: true, ..CONFIG };

/// Packed documents, some shorter than the convolution, on uneven shards.
fn hybrid(qkv_bias: bool, batch: Batch, ulysses: Value) -> Problem {
    let extra = json!({ "ulysses": ulysses });
    Problem { extra, clip: Some(0.25), ..problem(ReferenceConfig { qkv_bias, ..HYBRID }, batch) }
}

#[test]
fn convolutions_are_the_same_on_every_mesh_with_and_without_features() {
    let recompute = |saves: bool| json!({ "activation_checkpointing": true, "save_attention_output": saves });
    let tiles = json!({ "tile_tokens": 5, "head_chunks": 2, "overlap_exchange": true });
    let chunks =
        json!({ "activation_checkpointing": true, "save_attention_output": false, "head_chunks": 2 });
    // With sp 3 the shards are 0..8, 8..15 and 15..22.
    let masked = || packed_batch().mask_tokens(8..15);
    let problems = [
        hybrid(false, packed_batch(), json!({})),
        hybrid(true, masked(), json!({})),
        hybrid(false, masked(), recompute(false)),
        hybrid(true, packed_batch(), recompute(true)),
        hybrid(true, packed_batch(), tiles),
        hybrid(false, packed_batch(), chunks),
    ];
    check_features_where(&problems, GRID.layouts(), 2e-5, |_, _| true);
}
