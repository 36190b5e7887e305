//! Frozen parameters: no gradient, no optimizer state, no change. The others are trained as if nothing were
//! frozen.

use crate::support::compare::{assert_all_close, assert_scalar_close, values};
use crate::support::mesh_run::{Layout, Problem, Rule, bits, by_name, layout};
use crate::support::problems::{ADAMW, CONFIG, main_problem, packed_batch, problem};
use crate::support::reference::{
    Family, LambConfig, Optimizer, ReferenceConfig, Tensors, Weights, as_tensors,
};
use crate::support::sample::{axes, sampled};
use anyhow::Result;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use ulysses::engine::BatchOutcome;

const LAMB: LambConfig =
    LambConfig { lr: 1e-2, betas: (0.9, 0.95), eps: 1e-5, weight_decay: 0.1, coefficients: (0.01, 10.0) };

/// Whether a parameter of this name is frozen.
type IsFrozen = fn(&str) -> bool;

/// Patterns of frozen parameters, and by hand which parameters these are: parts of units, whole units, all
/// but one matrix of each.
const CASES: [(&str, IsFrozen); 4] = [
    ("embed_tokens|norm", |name| name.contains("embed_tokens") || name.contains("norm")),
    (r"layers\.0\.|lm_head", |name| name.contains("layers.0.") || name.contains("lm_head")),
    ("(q|down)_proj", |name| name.contains("q_proj") || name.contains("down_proj")),
    ("embed|norm|mlp|lm_head|[qkv]_proj", |name| !name.contains("o_proj")),
];

const MESHES: [(usize, usize); 4] = [(1, 1), (2, 2), (3, 1), (4, 2)];

fn layouts() -> impl Iterator<Item = Layout> {
    let of_mesh = |(dp, sp)| (0..=3).map(move |stage| layout(dp, sp, stage));
    MESHES
        .into_iter()
        .flat_map(of_mesh)
        .chain([0, 2].map(|stage| Layout { accumulation: 2, ..layout(2, 2, stage) }))
        .chain([1, 3].map(|stage| Layout { tp: 2, ..layout(2, 1, stage) }))
}

/// The patterns' indices in `CASES`, each with every layout.
fn frozen_layouts() -> impl Iterator<Item = (usize, Layout)> {
    layouts().flat_map(|layout| (0..CASES.len()).map(move |pattern| (pattern, layout)))
}

fn freeze(problem: &mut Problem, pattern: &str) {
    let groups = json!([{ "match": pattern, "frozen": true }]);
    problem.extra["ulysses"] = json!({ "parameter_groups": groups });
}

/// Compares a run with frozen parameters with the same run without.
fn check(label: &str, (frozen, plain): (&BatchOutcome, &BatchOutcome), is_frozen: IsFrozen, start: &Tensors) {
    assert_eq!(frozen.loss.to_bits(), plain.loss.to_bits(), "{label}: loss");
    let gradients = by_name(&frozen.gradients);
    let mut squares = 0.0;
    for (name, expected) in by_name(&plain.gradients) {
        let expected = values(&expected);
        match gradients.get(&name) {
            None => assert!(is_frozen(&name), "{label}: {name} has no gradient"),
            Some(gradient) => {
                assert!(!is_frozen(&name), "{label}: {name} has a gradient");
                assert!(values(gradient) == expected, "{label}: the gradient of {name} is another");
                squares += expected.iter().map(|x| x * x).sum::<f64>();
            }
        }
    }
    assert_scalar_close(&format!("{label}: norm"), frozen.reports[0].grad_norm, squares.sqrt(), 1e-7);
    assert_eq!(frozen.parameters.len(), plain.parameters.len(), "{label}: parameters");
    for (name, after) in by_name(&frozen.parameters) {
        let stayed = values(&after) == values(&start[&name]);
        assert_eq!(stayed, is_frozen(&name), "{label}: {name} {}", if stayed { "stayed" } else { "moved" });
    }
}

#[test]
fn frozen_parameters_keep_their_bits_and_the_others_get_the_gradients_of_a_run_without_any() {
    let cases = frozen_layouts().flat_map(|case| [false, true].map(|checkpointing| (case, checkpointing)));
    for ((pattern, layout), checkpointing) in sampled(cases, |((pattern, layout), checkpointing)| {
        [axes![pattern, checkpointing], layout.axes()].concat()
    }) {
        // Clipped: the norm of the update is that of the trained parameters.
        let mut problem = main_problem(Rule::AdamW(ADAMW), Some(0.5));
        problem.extra["ulysses"] = json!({ "activation_checkpointing": checkpointing });
        let plain = problem.run(layout).unwrap();
        let (pattern, is_frozen) = CASES[pattern];
        freeze(&mut problem, pattern);
        problem.extra["ulysses"]["activation_checkpointing"] = json!(checkpointing);
        let frozen = problem.run(layout).unwrap();
        let label = format!("{pattern} {layout:?}");
        check(&label, (&frozen, &plain), is_frozen, &as_tensors(&problem.weights));
    }
}

/// With a tied head the shared matrix is one parameter: it is frozen in both roles, or in none.
#[test]
fn a_tied_matrix_and_biases_are_frozen_as_others_are() {
    let config = ReferenceConfig { tie_word_embeddings: true, qkv_bias: true, num_layers: 1, ..CONFIG };
    let cases: [(&str, IsFrozen); 2] = [
        ("embed_tokens|q_proj.bias", |name| name.contains("embed_tokens") || name.contains("q_proj.bias")),
        ("model.norm|v_proj|k_proj.weight", |name| {
            ["model.norm", "v_proj", "k_proj.weight"].iter().any(|part| name.contains(part))
        }),
    ];
    for layout in [layout(1, 1, 0), layout(2, 2, 1), layout(3, 1, 3), layout(1, 3, 2)] {
        let mut problem = Problem { rule: Rule::AdamW(ADAMW), ..problem(config.clone(), packed_batch()) };
        let plain = problem.run(layout).unwrap();
        for (pattern, is_frozen) in cases {
            freeze(&mut problem, pattern);
            let frozen = problem.run(layout).unwrap();
            let label = format!("{pattern} {layout:?}");
            check(&label, (&frozen, &plain), is_frozen, &as_tensors(&problem.weights));
        }
    }
}

/// The reference's optimizer for each parameter that is not frozen.
struct Partly {
    rule: Rule,
    is_frozen: IsFrozen,
    optimizers: BTreeMap<String, Box<dyn Optimizer>>,
}

impl Optimizer for Partly {
    fn step(&mut self, weights: &mut Weights, grads: &Tensors) -> Result<()> {
        for (name, weight) in weights.iter_mut().filter(|(name, _)| !(self.is_frozen)(name)) {
            let optimizer = self.optimizers.entry(name.clone()).or_insert_with(|| self.rule.reference());
            let mut alone: Weights = [(name.clone(), weight.clone())].into();
            optimizer.step(&mut alone, grads)?;
            *weight = alone.remove(name).unwrap();
        }
        Ok(())
    }
}

#[test]
fn every_mesh_trains_the_others_as_the_reference_does() {
    let trained = [Rule::AdamW(ADAMW), Rule::Lamb(LAMB)].map(|rule| {
        CASES.map(|(pattern, is_frozen)| {
            let mut problem = main_problem(rule, None);
            let mut optimizer = Partly { rule, is_frozen, optimizers: BTreeMap::new() };
            let expected = problem.reference_with(&mut optimizer).unwrap();
            freeze(&mut problem, pattern);
            (expected, problem)
        })
    });
    let cases = frozen_layouts().flat_map(|case| [0, 1].map(|rule| (rule, case)));
    for (rule, (pattern, layout)) in
        sampled(cases, |(rule, (pattern, layout))| [axes![rule, pattern], layout.axes()].concat())
    {
        let (expected, problem) = &trained[rule][pattern];
        let label = format!("{:?} {} {layout:?}", problem.rule, CASES[pattern].0);
        let outcome = problem.run(layout).unwrap();
        let parameters = by_name(&outcome.parameters);
        assert_all_close(&label, &parameters, &as_tensors(&expected.weights), 5e-5);
        for (report, step) in outcome.reports.iter().zip(&expected.steps) {
            assert_scalar_close(&format!("{label}: loss"), report.loss, step.loss, 5e-5);
        }
    }
}

#[test]
fn all_four_stages_give_the_same_bits() {
    let partitioned = frozen_layouts().filter(|(_, layout)| layout.stage > 0 && layout.accumulation == 1);
    let rules = [Rule::AdamW(ADAMW), Rule::Lamb(LAMB)];
    let cases = partitioned.flat_map(|case| rules.map(|rule| (rule, case)));
    for (rule, (pattern, layout)) in
        sampled(cases, |(rule, (pattern, layout))| [axes![rule, pattern], layout.axes()].concat())
    {
        let (mut problem, (pattern, _)) = (main_problem(rule, Some(0.5)), CASES[pattern]);
        freeze(&mut problem, pattern);
        let [zero, other] = [Layout { stage: 0, ..layout }, layout]
            .map(|layout| bits(&problem.run(layout).unwrap()).unwrap());
        assert!(other == zero, "{rule:?} {pattern} {layout:?}");
    }
}

/// Without a master copy, a frozen parameter has the precision of 16 bits.
#[test]
fn in_16_bits_a_frozen_parameter_stays_the_rounded_value() {
    for (stage, (dp, sp)) in [(0, (1, 1)), (1, (2, 2)), (2, (3, 1)), (3, (2, 1))] {
        let mut problem = main_problem(Rule::AdamW(ADAMW), None);
        problem.extra = json!({ "bf16": { "enabled": true } });
        let plain = problem.run(layout(dp, sp, stage)).unwrap();
        freeze(&mut problem, CASES[0].0);
        let outcome = problem.run(layout(dp, sp, stage)).unwrap();
        let round = |tensor: &candle_core::Tensor| {
            tensor.to_dtype(candle_core::DType::F32).unwrap().to_dtype(candle_core::DType::BF16).unwrap()
        };
        let start = as_tensors(&problem.weights);
        let start = start.iter().map(|(name, tensor)| (name.clone(), round(tensor))).collect();
        check(&format!("bf16 {dp}x{sp} stage {stage}"), (&outcome, &plain), CASES[0].1, &start);
    }
}

fn refusal(groups: Value) -> String {
    let mut problem = main_problem(Rule::AdamW(ADAMW), None);
    problem.extra = json!({ "ulysses": { "parameter_groups": groups } });
    format!("{:#}", problem.run(layout(1, 1, 0)).unwrap_err())
}

#[test]
fn a_parameter_is_frozen_by_its_first_group_only() {
    let mut problem = main_problem(Rule::AdamW(ADAMW), None);
    let groups = json!([{ "match": "lm_head" }, { "match": "lm_head|q_proj", "frozen": true }]);
    problem.extra = json!({ "ulysses": { "parameter_groups": groups } });
    let outcome = problem.run(layout(2, 1, 3)).unwrap();
    for (name, after) in by_name(&outcome.parameters) {
        let stayed = values(&after) == values(&as_tensors(&problem.weights)[&name]);
        assert_eq!(stayed, name.contains("q_proj"), "{name}");
    }
}

#[test]
fn groups_that_freeze_everything_or_nothing_are_errors_with_their_pattern() {
    let all = refusal(json!([{ "match": "norm", "frozen": true }, { "match": "weight$", "frozen": true }]));
    let expected = "freezes every parameter (\"norm\", \"weight$\"), so there is nothing to train";
    assert!(all.contains(expected), "{all}");
    let none = refusal(json!([{ "match": "lm_heads", "frozen": true }]));
    assert!(none.contains("no parameter has a name that matches \"lm_heads\""), "{none}");
}

#[test]
fn groups_that_leave_only_constants_freeze_everything() {
    // Its layers have a constant factor beside their weights.
    let gemma4 = ReferenceConfig { family: Family::Gemma4, num_layers: 2, sliding_window: Some(5), ..CONFIG };
    let frozen = json!({ "ulysses": { "parameter_groups": [{ "match": "weight$", "frozen": true }] } });
    let problem = Problem { extra: frozen, ..problem(gemma4, packed_batch()) };
    let error = format!("{:#}", problem.run(layout(1, 1, 0)).unwrap_err());
    assert!(error.contains("freezes every parameter"), "{error}");
}
