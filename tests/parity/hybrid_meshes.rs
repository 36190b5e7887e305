//! Hybrid meshes and rank maps change who computes what, and no bit of the result.

use crate::support::mesh_run::{Layout, Problem, Rule, bits, layout};
use crate::support::problems::{ADAMW, main_problem};
use crate::support::sample::sampled;
use serde_json::{Value, json};

/// Layouts of the same groups at all stages, with accumulation, partitions over dp × sp, and replicas of partitions.
fn layouts(dp: usize, sp: usize) -> Vec<Layout> {
    let mut layouts: Vec<Layout> = (0..=3).map(|stage| layout(dp, sp, stage)).collect();
    layouts.push(Layout { accumulation: 2, ..layout(dp, sp, 3) });
    layouts.push(Layout { spans_sp: true, ..layout(dp, sp, 3) });
    if dp == 4 {
        layouts.push(Layout { shard_size: Some(2), ..layout(dp, sp, 3) });
    }
    layouts
}

#[track_caller]
fn assert_bit_equal_to_flat(problem: &Problem, (dp, sp): (usize, usize), mesh: Value) {
    for layout in sampled(layouts(dp, sp), Layout::axes) {
        let flat = problem.run(layout).unwrap();
        let hybrid = Problem { extra: json!({ "ulysses": { "mesh": mesh } }), ..problem.clone() };
        let placed = hybrid.json_config(layout, 8).unwrap().placed_mesh(None).unwrap();
        assert!(!placed.mesh.ranks().is_sorted(), "the ranks of {mesh} are not row-major");
        let outcome = hybrid.run(layout).unwrap();
        assert!(bits(&flat).unwrap() == bits(&outcome).unwrap(), "{mesh} differs from {layout:?}");
    }
}

#[test]
fn training_on_a_hybrid_mesh_is_bit_equal_to_a_flat_one() {
    let problem = main_problem(Rule::AdamW(ADAMW), Some(0.25));
    // Sequences across two nodes, dp within them.
    assert_bit_equal_to_flat(&problem, (2, 2), json!({ "intra": { "dp": 2 }, "inter": { "sp": 2 } }));
    // Both axes split.
    assert_bit_equal_to_flat(&problem, (4, 2), json!({ "ici": { "dp": 2 }, "dcn": { "dp": 2, "sp": 2 } }));
    // Uneven shards and heads.
    assert_bit_equal_to_flat(&problem, (2, 3), json!({ "intra": { "dp": 2 }, "inter": { "sp": 3 } }));
}

#[test]
fn training_on_a_rank_map_is_bit_equal_to_row_major_ranks() {
    let problem = main_problem(Rule::AdamW(ADAMW), None);
    assert_bit_equal_to_flat(&problem, (2, 2), json!("dp=2,sp=2@3,0,2,1"));
}
