//! `"loss_normalization": "micro_batch"`: the mean of the micro batches' means, as in DeepSpeed.

use crate::support::mesh_run::{Layout, Problem, assert_matches, layout};
use crate::support::problems::{CONFIG, packed_batch, problem};
use crate::support::reference::{
    Batch, Optimizer, Sgd, Step, Training, clip_by_global_norm, global_norm, micro_batch_loss_and_grads,
};
use crate::support::sample::sampled;
use serde_json::json;
use std::collections::BTreeMap;

const MESHES: [(usize, usize); 6] = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (4, 2)];

const CLIP: f64 = 0.25;

fn micro_batch_problem(batch: Batch) -> Problem {
    let extra = json!({ "loss_normalization": "micro_batch" });
    Problem { extra, clip: Some(CLIP), steps: 1, ..problem(CONFIG, batch) }
}

/// One clipped SGD step by the reference, with micro batches of `rows` consecutive sequences: micro step `a`
/// of dp rank `d` takes the sequences from `(a·dp + d)·rows` on.
fn expected(problem: &Problem, rows: usize) -> Training {
    let chunks = (0..problem.batch.num_rows()).step_by(rows);
    let micro_batches: Vec<Batch> = chunks.map(|first| problem.batch.rows(first..first + rows)).collect();
    let (loss, grads) =
        micro_batch_loss_and_grads(&problem.config, &problem.weights, &micro_batches).unwrap();
    let mut weights = problem.weights.clone();
    Sgd::new(0.1, 0.0, 0.0).step(&mut weights, &clip_by_global_norm(&grads, CLIP).unwrap()).unwrap();
    Training { steps: vec![Step { loss, grad_norm: global_norm(&grads).unwrap(), grads }], weights }
}

/// Compares a sample of all meshes, stages and accumulations with the reference.
#[track_caller]
fn check(problem: &Problem) {
    let meshes = MESHES.into_iter().flat_map(|(dp, sp)| [0, 1, 2, 3].map(|stage| layout(dp, sp, stage)));
    let layouts = meshes.flat_map(|layout| [1, 2].map(|accumulation| Layout { accumulation, ..layout }));
    let pipelines =
        [layout(1, 3, 1), layout(2, 1, 3)].map(|layout| Layout { pp: 2, accumulation: 2, ..layout });
    let mut by_rows: BTreeMap<usize, Training> = BTreeMap::new();
    for layout in sampled(layouts.chain(pipelines), Layout::axes) {
        let rows = problem.batch.num_rows() / (layout.dp * layout.accumulation);
        let expected = by_rows.entry(rows).or_insert_with(|| expected(problem, rows));
        let outcome = problem.run(layout).unwrap();
        assert_matches(&outcome, expected, 2e-5, &format!("{layout:?}"));
    }
}

#[test]
fn each_micro_batch_counts_the_same_however_many_labels_it_has() {
    check(&micro_batch_problem(packed_batch().mask_rows(6..7)));
}

#[test]
fn a_micro_batch_without_labels_contributes_zero() {
    // One of the micro batches of one sequence, and of two sequences each.
    check(&micro_batch_problem(packed_batch().mask_rows(2..4)));
}

#[test]
fn a_shard_without_labels_counts_in_the_mean_of_its_sp_group() {
    // The first shard with sp 3.
    check(&micro_batch_problem(packed_batch().mask_tokens(0..8)));
}

#[test]
fn the_two_normalizations_differ_where_labels_are_uneven() {
    let problem = micro_batch_problem(packed_batch().mask_rows(6..7));
    let global = problem.reference().unwrap().steps[0].loss;
    let micro_batch = expected(&problem, 2).steps[0].loss;
    assert!((global - micro_batch).abs() > 1e-3 * global, "{global} {micro_batch}");
}

#[test]
fn a_batch_without_any_label_is_skipped() {
    let problem = micro_batch_problem(packed_batch().mask_rows(0..8));
    for layout in [layout(1, 1, 0), layout(2, 2, 3), Layout { pp: 2, ..layout(2, 1, 1) }] {
        let report = &problem.run(layout).unwrap().reports[0];
        assert_eq!((report.skipped, report.loss, report.grad_norm, report.label_tokens), (true, 0.0, 0.0, 0));
    }
}
