//! Parameter groups: learning rates and weight decay by parameter name, on partitions that cut through
//! groups.

use crate::support::mesh_run::{Layout, Problem, Rule, assert_matches, bits, by_name, layout};
use crate::support::problems::{ADAMW, main_problem};
use crate::support::reference::{
    AdagradConfig, AdamWConfig, LambConfig, LionConfig, Optimizer, Tensors, Weights, as_tensors,
};
use crate::support::sample::{axes, sampled};
use anyhow::Result;
use serde_json::{Value, json};

/// The head's learning rate.
const HEAD_LR: f64 = 3e-4;

/// Norms have no decay; the first layer, the embedding and the head have separate learning rates. The norms
/// of the first layer belong to the first group.
fn groups() -> Value {
    json!([
        { "match": "norm", "weight_decay": 0.0 },
        { "match": r"layers\.0\.", "lr_scale": 2.0, "weight_decay": 0.3 },
        { "match": "^model.embed_tokens", "lr_scale": 0.25 },
        { "match": "lm_head", "lr": HEAD_LR },
    ])
}

/// The group of a parameter, computed by hand, as (learning rate factor, weight decay).
fn settings(name: &str, rule: Rule) -> (f64, f64) {
    match name {
        "lm_head.weight" => (HEAD_LR / lr(rule), 0.1),
        _ if name.contains("norm") => (1.0, 0.0),
        _ if name.contains("layers.0.") => (2.0, 0.3),
        "model.embed_tokens.weight" => (0.25, 0.1),
        _ => (1.0, 0.1),
    }
}

fn lr(rule: Rule) -> f64 {
    match rule {
        Rule::Sgd { lr } => lr,
        Rule::AdamW(config) => config.lr,
        Rule::Lion(config) => config.lr,
        Rule::Adagrad(config) => config.lr,
        Rule::Lamb(config) => config.lr,
    }
}

const RULES: [fn(f64, f64) -> Rule; 4] = [
    |factor, weight_decay| Rule::AdamW(AdamWConfig { lr: factor * ADAMW.lr, weight_decay, ..ADAMW }),
    |factor, weight_decay| Rule::Lion(LionConfig { lr: factor * 1e-3, betas: (0.9, 0.99), weight_decay }),
    |factor, weight_decay| {
        let (lr, initial_accumulator_value) = (factor * 1e-2, 1e-3);
        Rule::Adagrad(AdagradConfig {
            lr,
            lr_decay: 0.5,
            eps: 1e-10,
            weight_decay,
            initial_accumulator_value,
        })
    },
    |factor, weight_decay| {
        let (lr, coefficients) = (factor * 1e-2, (0.01, 10.0));
        Rule::Lamb(LambConfig { lr, betas: (0.9, 0.95), eps: 1e-5, weight_decay, coefficients })
    },
];

/// One of the reference's optimizers per parameter.
struct Grouped {
    rule: fn(f64, f64) -> Rule,
    optimizers: std::collections::BTreeMap<String, Box<dyn Optimizer>>,
}

impl Optimizer for Grouped {
    fn step(&mut self, weights: &mut Weights, grads: &Tensors) -> Result<()> {
        for (name, weight) in weights {
            let (factor, weight_decay) = settings(name, (self.rule)(1.0, 0.1));
            let new = || (self.rule)(factor, weight_decay).reference();
            let optimizer = self.optimizers.entry(name.clone()).or_insert_with(new);
            let mut alone: Weights = [(name.clone(), weight.clone())].into();
            optimizer.step(&mut alone, grads)?;
            *weight = alone.remove(name).unwrap();
        }
        Ok(())
    }
}

fn grouped_problem(rule: fn(f64, f64) -> Rule) -> Problem {
    let mut problem = main_problem(rule(1.0, 0.1), None);
    problem.extra = json!({ "ulysses": { "parameter_groups": groups() } });
    problem
}

const MESHES: [(usize, usize); 4] = [(1, 1), (2, 2), (3, 1), (4, 2)];

fn layouts() -> impl Iterator<Item = Layout> {
    MESHES.into_iter().flat_map(|(dp, sp)| (0..=3).map(move |stage| layout(dp, sp, stage)))
}

fn axes_of(Problem { rule, .. }: &Problem, layout: &Layout) -> Vec<String> {
    [axes![rule], layout.axes()].concat()
}

#[test]
fn each_parameter_is_trained_with_the_settings_of_its_first_group() {
    let trained = RULES.map(|rule| {
        let problem = grouped_problem(rule);
        let expected = problem.reference_with(&mut Grouped { rule, optimizers: Default::default() });
        (expected.unwrap(), problem)
    });
    let cases = layouts().flat_map(|layout| trained.iter().map(move |trained| (trained, layout)));
    for ((expected, problem), layout) in sampled(cases, |((_, problem), layout)| axes_of(problem, layout)) {
        let label = format!("{:?} {layout:?}", problem.rule);
        assert_matches(&problem.run(layout).unwrap(), expected, 5e-5, &label);
    }
}

#[test]
fn all_four_stages_give_the_same_bits() {
    let partitioned = layouts().filter(|layout| layout.stage > 0);
    let cases = partitioned.flat_map(|layout| RULES.map(|rule| (grouped_problem(rule), layout)));
    for (problem, layout) in sampled(cases, |(problem, layout)| axes_of(problem, layout)) {
        let [zero, other] = [Layout { stage: 0, ..layout }, layout]
            .map(|layout| bits(&problem.run(layout).unwrap()).unwrap());
        assert!(other == zero, "{:?} {layout:?}", problem.rule);
    }
}

/// As in PyTorch, where a `LambdaLR` multiplies every group's learning rate by the same factor.
#[test]
fn a_schedule_scales_the_learning_rate_of_a_group_like_the_optimizers() {
    let run = |group: Value| {
        let mut problem = main_problem(Rule::AdamW(ADAMW), None);
        problem.extra = json!({
            "ulysses": { "parameter_groups": [group] },
            "scheduler": { "type": "WarmupLR", "params": {
                "warmup_min_lr": 1e-4, "warmup_max_lr": 5e-4, "warmup_num_steps": 3, "warmup_type": "linear" } },
        });
        bits(&problem.run(layout(2, 1, 3)).unwrap()).unwrap()
    };
    // A power of two: both notations give the same value.
    let scaled = run(json!({ "match": "lm_head", "lr_scale": 0.5 }));
    assert!(run(json!({ "match": "lm_head", "lr": 0.5 * ADAMW.lr })) == scaled);
    assert!(run(json!({ "match": "lm_head", "lr": 0.25 * ADAMW.lr })) != scaled);
}

#[test]
fn a_rate_of_zero_leaves_a_group_as_it_is() {
    let mut problem = main_problem(Rule::AdamW(ADAMW), None);
    problem.extra =
        json!({ "ulysses": { "parameter_groups": [{ "match": "q_proj|norm", "lr_scale": 0.0 }] } });
    let before = as_tensors(&problem.weights);
    for layout in [layout(1, 1, 0), layout(3, 1, 3)] {
        for (name, after) in by_name(&problem.run(layout).unwrap().parameters) {
            let is_same =
                crate::support::compare::values(&after) == crate::support::compare::values(&before[&name]);
            assert_eq!(is_same, name.contains("q_proj") || name.contains("norm"), "{name} {layout:?}");
        }
    }
}

#[test]
fn a_pattern_that_matches_nothing_is_an_error_with_similar_names() {
    let mut problem = main_problem(Rule::AdamW(ADAMW), None);
    let groups = json!([{ "match": "norm" }, { "match": "model.embed_token.weight" }]);
    problem.extra = json!({ "ulysses": { "parameter_groups": groups } });
    let error = format!("{:#}", problem.run(layout(1, 1, 0)).unwrap_err());
    let expected = "`ulysses.parameter_groups[1].match`: no parameter has a name that matches \
                    \"model.embed_token.weight\"; for example, there is model.embed_tokens.weight";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_group_whose_parameters_are_all_in_earlier_groups_is_an_error() {
    let mut problem = main_problem(Rule::AdamW(ADAMW), None);
    let groups = json!([{ "match": "norm" }, { "match": "." }, { "match": "mlp", "lr_scale": 0.5 }]);
    problem.extra = json!({ "ulysses": { "parameter_groups": groups } });
    let error = format!("{:#}", problem.run(layout(1, 1, 0)).unwrap_err());
    let expected = "`ulysses.parameter_groups[2].match`: every parameter with a name that matches \"mlp\" is in an \
                    earlier group";
    assert!(error.contains(expected), "{error}");
}
