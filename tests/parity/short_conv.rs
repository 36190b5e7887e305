//! Gated short convolutions (LFM2) against the independent f64 reference: on every mesh they see whole documents, and nothing
//! else.

use crate::support::mesh_run::{Layout, Problem, assert_matches, layout};
use crate::support::problems::{CONFIG, packed_batch, problem};
use crate::support::reference::{Batch, Family, ReferenceConfig};
use crate::support::sample::{axes, sampled};
use serde_json::{Value, json};

/// Two layers with convolutions of 24 channels and three taps, one with attention.
const HYBRID: ReferenceConfig =
    ReferenceConfig { family: Family::Lfm2, num_layers: 3, tie_word_embeddings: true, ..CONFIG };

/// Packed documents, some shorter than the convolution, on uneven shards.
fn hybrid(qkv_bias: bool, batch: Batch, ulysses: Value) -> Problem {
    let extra = json!({ "ulysses": ulysses });
    Problem { extra, clip: Some(0.25), ..problem(ReferenceConfig { qkv_bias, ..HYBRID }, batch) }
}

fn layouts() -> impl Iterator<Item = Layout> {
    let meshes = [(1, 1), (2, 1), (1, 2), (1, 3), (2, 2), (1, 4), (1, 5)];
    let with_stages = meshes.into_iter().flat_map(|(dp, sp)| [0, 1, 2, 3].map(|stage| layout(dp, sp, stage)));
    let pipelines = [(1, 1), (2, 1), (1, 3)].map(|(dp, sp)| Layout { pp: 2, ..layout(dp, sp, 1) });
    let divided = [(1, 1, 2), (1, 2, 2), (2, 1, 3), (1, 1, 4)];
    let divided = divided.map(|(dp, sp, tp)| Layout { tp, ..layout(dp, sp, 3) });
    let rings = [(2, 2, 1), (2, 4, 1), (3, 3, 1), (2, 2, 2)];
    let rings = rings.map(|(ring, sp, tp)| Layout { ring, tp, ..layout(1, sp, 2) });
    let all = with_stages.chain(pipelines).chain(divided).chain(rings);
    all.flat_map(|layout| [1, 2].map(|accumulation| Layout { accumulation, ..layout }))
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
    let expected: Vec<_> = problems.iter().map(|problem| problem.reference().unwrap()).collect();
    let cases = layouts().flat_map(|layout| (0..problems.len()).map(move |number| (layout, number)));
    // A chunk of two has four heads, of which each rank needs one; each of four ranks of tp has one KV head.
    let fits = |Layout { sp, tp, .. }: &Layout| sp * tp <= 4 && *tp < 3;
    let cases = cases.filter(|(layout, number)| *number < 4 || fits(layout));
    for (layout, number) in sampled(cases, |(layout, number)| [axes![number], layout.axes()].concat()) {
        let outcome = problems[number].run(layout).unwrap();
        assert_matches(&outcome, &expected[number], 2e-5, &format!("problem {number}, {layout:?}"));
    }
}
