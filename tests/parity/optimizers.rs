//! Every optimizer against its formula in f64, on meshes and stages that partition its tensors in every way.

use crate::support::compare::assert_all_close;
use crate::support::compare::{max_rel_error, values};
use crate::support::mesh_run::{Layout, Problem, Rule, assert_matches, bits, by_name, layout};
use crate::support::problems::{ADAGRAD, LAMB, LION, main_problem};
use crate::support::reference::{LambConfig, as_tensors};
use crate::support::sample::{Sample, axes, sampled};
use serde_json::json;

/// Tight bounds that norms and large matrices reach from both sides.
const BOUNDED_LAMB: LambConfig = LambConfig { coefficients: (0.2, 0.5), ..LAMB };

const RULES: [Rule; 4] =
    [Rule::Lion(LION), Rule::Adagrad(ADAGRAD), Rule::Lamb(LAMB), Rule::Lamb(BOUNDED_LAMB)];

/// Meshes whose partitions cut through tensors, with shards of equal and unequal length.
const MESHES: [(usize, usize); 6] = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (4, 2)];

fn layouts() -> impl Iterator<Item = Layout> {
    MESHES.into_iter().flat_map(|(dp, sp)| (0..=3).map(move |stage| layout(dp, sp, stage)))
}

/// A sample of rules and layouts at stages 1 to 3, which are compared with stage 0.
#[track_caller]
fn partitioned(rules: &[Rule]) -> Sample<(Rule, Layout)> {
    let layouts = layouts().filter(|layout| layout.stage > 0);
    let cases = layouts.flat_map(|layout| rules.iter().map(move |rule| (*rule, layout)));
    sampled(cases, |(rule, layout)| [axes![rule], layout.axes()].concat())
}

#[test]
fn three_steps_are_those_of_the_formula_on_every_mesh_and_stage() {
    let problems = RULES.into_iter().flat_map(|rule| [None, Some(0.25)].map(|clip| main_problem(rule, clip)));
    let trained = problems.map(|problem| (problem.reference().unwrap(), problem)).collect::<Vec<_>>();
    for (expected, problem) in &trained {
        let before = as_tensors(&problem.weights);
        for (name, after) in as_tensors(&expected.weights) {
            let moved = max_rel_error(&values(&after), &before[&name]);
            assert!(moved > 1e-3, "{:?}: three steps must be seen in {name}, {moved}", problem.rule);
        }
    }
    let cases = layouts().flat_map(|layout| trained.iter().map(move |trained| (trained, layout)));
    for ((expected, problem), layout) in sampled(cases, |((_, Problem { rule, clip, .. }), layout)| {
        [axes![rule, clip], layout.axes()].concat()
    }) {
        let label = format!("{:?} clip {:?} {layout:?}", problem.rule, problem.clip);
        assert_matches(&problem.run(layout).unwrap(), expected, 5e-5, &label);
    }
}

#[test]
fn all_four_stages_give_the_same_bits() {
    for (rule, layout) in partitioned(&RULES) {
        let problem = main_problem(rule, None);
        let [zero, other] = [Layout { stage: 0, ..layout }, layout]
            .map(|layout| bits(&problem.run(layout).unwrap()).unwrap());
        assert!(other == zero, "{rule:?} {layout:?}");
    }
}

#[test]
fn with_accumulation_stages_differ_by_rounding_only() {
    // Not Lion: the sign of a direction that is almost 0 depends on rounding.
    for (rule, layout) in partitioned(&[Rule::Adagrad(ADAGRAD), Rule::Lamb(LAMB)]) {
        let problem = main_problem(rule, None);
        let [zero, other] = [0, layout.stage].map(|stage| {
            by_name(&problem.run(Layout { accumulation: 2, stage, ..layout }).unwrap().parameters)
        });
        assert_all_close(&format!("{rule:?} {layout:?}: parameter"), &other, &zero, 1e-6);
    }
}

#[test]
fn in_bf16_the_master_copy_is_updated_and_all_stages_give_the_same_bits() {
    for rule in RULES {
        let mut problem = main_problem(rule, None);
        problem.extra = json!({ "bf16": { "enabled": true } });
        let expected = as_tensors(&problem.reference().unwrap().weights);
        for (dp, sp) in [(1, 1), (2, 2), (3, 1)] {
            let [zero, others @ ..] = [0, 1, 2, 3].map(|stage| problem.run(layout(dp, sp, stage)).unwrap());
            for (stage, other) in (1..).zip(others) {
                assert!(bits(&other).unwrap() == bits(&zero).unwrap(), "{rule:?} {dp}x{sp} stage {stage}");
            }
            // bf16 gradients reverse some of the smallest steps: at most 2 · 3 steps of 1e-2.
            let label = format!("{rule:?} {dp}x{sp}: parameter");
            assert_all_close(&label, &by_name(&zero.parameters), &expected, 6e-2);
        }
    }
}
