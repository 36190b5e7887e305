//! Pipeline parallelism never changes the math: layouts with stages against the independent f64 reference.

use crate::support::mesh_run::{Layout, Problem, Rule, assert_matches, layout};
use crate::support::problems::{ADAMW, CONFIG, LAMB, main_problem, packed_batch, problem};
use crate::support::reference::{Family, ReferenceConfig};
use crate::support::sample::{axes, sampled};
use serde_json::json;

/// Five layers, for stages of different sizes.
const DEEP: ReferenceConfig = ReferenceConfig { num_layers: 5, ..CONFIG };

/// The sizes of a mesh, outermost axis first.
const fn on_pp([pp, dp, sp, tp]: [usize; 4], stage: u8) -> Layout {
    Layout { pp, tp, ..layout(dp, sp, stage) }
}

/// pp × dp × sp × tp on up to 8 ranks, at every stage; fewer and more micro batches than stages.
fn grid() -> impl Iterator<Item = Layout> {
    let meshes = [
        [2, 1, 1, 1],
        [3, 1, 1, 1],
        [2, 2, 1, 1],
        [2, 1, 2, 1],
        [2, 1, 1, 2],
        [2, 2, 2, 1],
        [2, 1, 2, 2],
        [3, 2, 1, 1],
        [4, 1, 1, 1],
        [5, 1, 1, 1],
    ];
    meshes.into_iter().flat_map(|mesh| {
        (0..=3).flat_map(move |stage| {
            [1, 2, 4].map(|accumulation| Layout { accumulation, ..on_pp(mesh, stage) })
        })
    })
}

/// Checks a sample of all problems on the grid.
#[track_caller]
fn check_each(problems: &[Problem], tolerance: f64) {
    let expected: Vec<_> = problems.iter().map(|problem| problem.reference().unwrap()).collect();
    let cases = (0..problems.len()).flat_map(|number| grid().map(move |layout| (number, layout)));
    let cases = cases.filter(|(number, layout)| layout.pp <= problems[*number].config.num_layers);
    for (number, layout) in sampled(cases, |(number, layout)| [axes![number], layout.axes()].concat()) {
        let outcome = problems[number].run(layout).unwrap();
        assert_matches(&outcome, &expected[number], tolerance, &format!("problem {number}, {layout:?}"));
    }
}

fn deep(rule: Rule, clip: Option<f64>) -> Problem {
    Problem { rule, clip, ..problem(DEEP, packed_batch()) }
}

#[test]
fn two_stages_match() {
    let problem = main_problem(Rule::Sgd { lr: 0.1 }, Some(0.25));
    let layout = Layout { accumulation: 2, ..on_pp([2, 1, 1, 1], 0) };
    assert_matches(&problem.run(layout).unwrap(), &problem.reference().unwrap(), 2e-5, "two stages");
}

#[test]
fn stages_train_as_whole_models_on_every_mesh_stage_and_accumulation() {
    check_each(&[deep(Rule::Sgd { lr: 0.1 }, Some(0.25)), deep(Rule::AdamW(ADAMW), None)], 5e-5);
}

#[test]
fn norms_of_whole_tensors_are_those_of_their_stage() {
    check_each(&[deep(Rule::Lamb(LAMB), None)], 2e-4);
}

#[test]
fn tied_embeddings_are_summed_over_both_stages_and_counted_once() {
    let tied = ReferenceConfig { tie_word_embeddings: true, ..DEEP };
    let with = |rule, clip| Problem { rule, clip, ..problem(tied.clone(), packed_batch()) };
    check_each(&[with(Rule::Sgd { lr: 0.1 }, Some(0.25)), with(Rule::AdamW(ADAMW), Some(0.25))], 5e-5);
    check_each(&[with(Rule::Lamb(LAMB), Some(0.25))], 2e-4);
}

#[test]
fn a_ring_within_stages_matches() {
    let problem = problem(DEEP, packed_batch());
    let expected = problem.reference().unwrap();
    for layout in [on_pp([2, 1, 2, 1], 1), on_pp([2, 1, 4, 1], 3)] {
        let ring = Layout { ring: 2, accumulation: 2, ..layout };
        assert_matches(&problem.run(ring).unwrap(), &expected, 2e-5, &format!("{ring:?}"));
    }
}

#[test]
fn recomputation_offload_and_other_families_change_nothing() {
    let options = [
        (Family::Llama, json!({ "ulysses": { "activation_checkpointing": true } })),
        (Family::Gemma3, json!({ "ulysses": { "activation_checkpointing": true } })),
        (Family::Granite, json!({ "ulysses": { "tile_tokens": 3, "loss_tile_tokens": 5 } })),
    ];
    let problems = options.into_iter().map(|(family, extra)| {
        let sliding_window = (family == Family::Gemma3).then_some(5);
        let tie_word_embeddings = family == Family::Gemma3;
        let config = ReferenceConfig { family, sliding_window, tie_word_embeddings, ..DEEP };
        Problem { extra, ..problem(config, packed_batch()) }
    });
    check_each(&problems.collect::<Vec<_>>(), 2e-5);
}

#[test]
fn more_stages_than_layers_are_refused() {
    let problem = problem(CONFIG, packed_batch());
    let error = format!("{:#}", problem.run(on_pp([3, 1, 1, 1], 0)).unwrap_err());
    assert!(error.contains("pp") && error.contains('2') && error.contains("layers"), "{error}");
}
