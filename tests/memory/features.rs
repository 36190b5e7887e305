//! Features that save memory change nothing else: each against a run without it, on the same mesh.

use crate::support::compare::{max_rel_error, values};
use crate::support::device::offload_target;
use crate::support::mesh_run::{Layout, Problem, Rule, bits, layout};
use crate::support::problems::{ADAGRAD, ADAMW, CONFIG, LAMB, LION, main_problem, packed_batch, problem};
use crate::support::reference::{Batch, Family, ReferenceConfig, Training, as_tensors};
use crate::support::sample::{axes, sampled, sampled_every};
use serde_json::{Value, json};
use ulysses::engine::BatchOutcome;

/// Limit of the error against the f64 reference for a run with another order of summation, relative to the usual error. For
/// most features the factor is up to 1.3.
const REORDERED: f64 = 2.0;

/// The same with norms over heads, where the factor is up to 1.9. The gradient of a key of four elements is
/// the result of cancellation: of the norm's radial part, after that of the softmax. `k_proj` of the last
/// layer has an error of 0.8e-6 to 4.1e-6 for any order of summation, by tiles of one token as well as by
/// head chunks. All other errors stay below 2.6e-6, with and without features.
const REORDERED_WITH_NORMS_OF_HEADS: f64 = 3.0;

fn run(problem: &Problem, extra: Value, layout: Layout) -> BatchOutcome {
    let problem = Problem { extra, ..problem.clone() };
    problem.run(layout).unwrap()
}

/// Uneven shards and heads, replicas, partitioned parameters, accumulation, stages of a pipeline.
fn layouts() -> impl Iterator<Item = Layout> {
    let meshes = [(1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (1, 4)];
    let once = meshes.into_iter().flat_map(|(dp, sp)| [0, 3].map(|stage| layout(dp, sp, stage)));
    let stages = Layout { pp: 2, ..layout(1, 2, 1) };
    once.chain([layout(2, 2, 2), stages].map(|layout| Layout { accumulation: 2, ..layout }))
}

/// Packed documents; a shard without a label; families with biases, with norms over heads, with a
/// window, with norms of outputs and windows in some layers, and with factors.
fn problems() -> Vec<Problem> {
    let sgd = Rule::Sgd { lr: 0.1 };
    let with = |config| Problem { rule: sgd, ..problem(config, packed_batch()) };
    vec![
        main_problem(sgd, Some(0.25)),
        Problem { rule: sgd, ..problem(CONFIG, packed_batch().mask_tokens(8..15)) },
        with(ReferenceConfig { qkv_bias: true, num_kv_heads: 8, ..CONFIG }),
        with(ReferenceConfig { qk_norm: true, ..CONFIG }),
        with(ReferenceConfig { sliding_window: Some(5), tie_word_embeddings: true, ..CONFIG }),
        with(ReferenceConfig { family: Family::Gemma3, sliding_window: Some(5), ..CONFIG }),
        with(ReferenceConfig { family: Family::Granite, ..CONFIG }),
    ]
}

/// Compares features with configs without them, on a sample of problems and layouts.
#[track_caller]
fn assert_same_bits(features: &[(Value, Value)]) {
    let problems = problems();
    let cases = (0..problems.len()).flat_map(|number| layouts().map(move |layout| (number, layout)));
    let cases = cases.flat_map(|case| (0..features.len()).map(move |feature| (case, feature)));
    for ((number, layout), feature) in
        sampled(cases, |((number, layout), feature)| [axes![number, feature], layout.axes()].concat())
    {
        let (features, without) = &features[feature];
        let outcomes = [without, features].map(|extra| run(&problems[number], extra.clone(), layout));
        let [expected, got] = outcomes.map(|outcome| bits(&outcome).unwrap());
        assert!(expected == got, "problem {number}, {layout:?}: {features} changes bits");
    }
}

/// Features may reorder sums: compares the error against f64 with that of runs without them on any layout with at most
/// the same sp. The features run on a sample of the layouts, for every `stride`-th problem.
#[track_caller]
fn assert_as_exact_as_plain(stride: usize, features: &[(Value, usize)]) {
    let problems = problems().into_iter().enumerate();
    for (number, problem) in sampled_every(stride, problems, |(number, _)| axes![number]) {
        // One step: later ones would compare how updates amplify the difference.
        let problem = &Problem { steps: 1, ..problem };
        let truth = problem.reference().unwrap();
        let error = |extra: &Value, layout| worst_error(&run(problem, extra.clone(), layout), &truth);
        let plain: Vec<_> = layouts().map(|layout| (layout.sp, error(&json!({}), layout).0)).collect();
        let factor = if problem.config.qk_norm { REORDERED_WITH_NORMS_OF_HEADS } else { REORDERED };
        let cases = features.iter().flat_map(|(features, max_sp)| {
            layouts().filter(|layout| layout.sp <= *max_sp).map(move |layout| (features, *max_sp, layout))
        });
        for (features, max_sp, layout) in
            sampled(cases, |(features, _, layout)| [axes![features], layout.axes()].concat())
        {
            let plain = plain.iter().filter(|(sp, _)| *sp <= max_sp).map(|(_, error)| *error);
            let plain = plain.fold(0.0, f64::max);
            let (got, what) = error(features, layout);
            assert!(
                got <= factor * plain,
                "problem {number}, {layout:?}, {features}: {what} is off by {got:.2e}, without by at most {plain:.2e}"
            );
        }
    }
}

/// The largest relative error of loss, norm, gradients and parameters after one step, and where it occurs.
fn worst_error(outcome: &BatchOutcome, truth: &Training) -> (f64, String) {
    let (report, step) = (&outcome.reports[0], &truth.steps[0]);
    let scalars = [("loss", report.loss, step.loss), ("norm", report.grad_norm, step.grad_norm)];
    let mut errors =
        scalars.map(|(what, got, expected)| ((got / expected - 1.0).abs(), what.to_owned())).to_vec();
    let parameters = as_tensors(&truth.weights);
    for (what, got, expected) in
        [("gradient", &outcome.gradients, &step.grads), ("parameter", &outcome.parameters, &parameters)]
    {
        assert_eq!(got.len(), expected.len(), "{what}s");
        let error = |(name, got): &(String, _)| {
            (max_rel_error(&values(got), &expected[name]), format!("{what} {name}"))
        };
        errors.extend(got.iter().map(error));
    }
    errors.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

#[test]
fn recomputing_all_or_every_other_layer_does_not_change_a_bit() {
    assert_same_bits(&[1, 2, 3].map(|interval| {
        let recomputing = json!({ "ulysses": {
            "activation_checkpointing": true, "activation_checkpointing_interval": interval,
        } });
        (recomputing, json!({}))
    }));
}

#[test]
fn offloaded_checkpoints_come_back_bit_for_bit() {
    assert_same_bits(&[1, 2].map(|chunks| {
        let ulysses = json!({ "activation_checkpointing": true, "head_chunks": chunks, "tile_tokens": 9 });
        let offloading =
            json!({ "ulysses": ulysses, "activation_checkpointing": { "cpu_checkpointing": true } });
        (offloading, json!({ "ulysses": ulysses }))
    }));
}

/// With and without intervals, tiles, head chunks and offload, in f32 and with an f32 lse next to bf16.
#[test]
fn a_saved_attention_output_does_not_change_a_bit() {
    let plain = json!({});
    let chunks = json!({ "head_chunks": 2, "tile_tokens": 7 });
    let every_other = json!({ "activation_checkpointing_interval": 2 });
    let features = [
        (false, false, &plain),
        (false, true, &chunks),
        (false, false, &every_other),
        (true, false, &chunks),
        (true, true, &plain),
    ];
    assert_same_bits(&features.map(|(is_bf16, offloads, more)| {
        let with = |saves: bool| {
            let mut ulysses = json!({ "activation_checkpointing": true, "save_attention_output": saves });
            ulysses.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({
                "bf16": { "enabled": is_bf16 }, "ulysses": ulysses,
                "activation_checkpointing": { "cpu_checkpointing": offloads },
            })
        };
        (with(true), with(false))
    }));
}

/// Stages that partition the offloaded tensors, with uneven partitions, replicas, accumulation, a pipeline and a group of one.
fn partitioned() -> impl Iterator<Item = Layout> {
    let meshes = [(1, 1), (2, 1), (2, 2), (3, 1)];
    let once = meshes.into_iter().flat_map(|(dp, sp)| [1, 2, 3].map(|stage| layout(dp, sp, stage)));
    let over_sp = [2, 3].map(|stage| Layout { spans_sp: true, ..layout(1, 2, stage) });
    let twice = [layout(2, 2, 3), layout(1, 2, 2), Layout { spans_sp: true, ..layout(2, 2, 2) }];
    let pipelines = [2, 3].map(|stage| Layout { pp: 2, ..layout(2, 1, stage) });
    let twice = twice.into_iter().chain(pipelines);
    once.chain(over_sp).chain(twice.map(|layout| Layout { accumulation: 2, ..layout }))
}

/// Every optimizer, clipped, with the fewest sequences that two dp ranks can accumulate. The size of the
/// state does not depend on them, and they take most of the time on simulated GPUs.
fn optimizers() -> Vec<Problem> {
    let rules = [
        Rule::Sgd { lr: 0.1 },
        Rule::AdamW(ADAMW),
        Rule::Lion(LION),
        Rule::Adagrad(ADAGRAD),
        Rule::Lamb(LAMB),
    ];
    let batch = Batch::packed(CONFIG.vocab_size, &[&[22], &[9, 13], &[1, 4, 17], &[7, 8, 7]], 11);
    let with = |rule| Problem { rule, clip: Some(0.25), ..problem(CONFIG, batch.clone()) };
    rules.map(with).into()
}

/// Compares lists of offloaded sections of `zero_optimization`, at the stage of the layout, with runs without offload: a
/// sample of optimizers, lists and layouts.
#[track_caller]
fn assert_offload_keeps_bits(extra: &Value, features: &[&[&str]], layouts: impl Iterator<Item = Layout>) {
    let cases = layouts.flat_map(|layout| optimizers().into_iter().map(move |problem| (problem, layout)));
    let cases = cases.flat_map(|(problem, layout)| {
        features.iter().map(move |sections| (problem.clone(), *sections, layout))
    });
    for (problem, sections, layout) in sampled(cases, |(problem, sections, layout)| {
        let rule = problem.rule;
        [axes![rule, sections], layout.axes()].concat()
    }) {
        assert_same_when_offloaded(&problem, extra, sections, [layout]);
    }
}

fn assert_same_when_offloaded(
    problem: &Problem,
    extra: &Value,
    sections: &[&str],
    layouts: impl IntoIterator<Item = Layout>,
) {
    for layout in layouts {
        let bits = |extra: &Value| bits(&run(problem, extra.clone(), layout)).unwrap();
        let mut offloading = extra.clone();
        offloading["zero_optimization"] = json!({ "stage": layout.stage });
        for section in sections {
            offloading["zero_optimization"][*section] = json!({ "device": offload_target() });
        }
        assert!(
            bits(extra) == bits(&offloading),
            "{:?}, {layout:?}: {offloading} changes bits",
            problem.rule
        );
    }
}

#[test]
fn offloaded_optimizer_state_comes_back_bit_for_bit() {
    for extra in [json!({}), json!({ "bf16": { "enabled": true } })] {
        assert_offload_keeps_bits(&extra, &[&["offload_optimizer"]], partitioned());
    }
}

/// With frozen parameters, and steps that an overflow skips before the loss scale fits.
#[test]
fn offloaded_gradients_come_back_bit_for_bit() {
    let frozen = json!([{ "match": "mlp|layers.0.", "frozen": true }]);
    let of_stages = [layout(2, 1, 2), Layout { accumulation: 2, ..layout(2, 2, 3) }];
    let extra = json!({
        "fp16": { "enabled": true, "initial_scale_power": 21, "hysteresis": 1 },
        "ulysses": { "parameter_groups": frozen },
    });
    let problem = |steps| Problem { steps, ..main_problem(Rule::AdamW(ADAMW), Some(0.25)) };
    let skipped = run(&problem(10), extra.clone(), of_stages[0]).reports;
    let skipped: Vec<_> = skipped.iter().map(|report| report.skipped).collect();
    assert!(skipped[0] && !skipped[9], "{skipped:?}");
    assert_same_when_offloaded(&problem(10), &extra, &["offload_optimizer"], of_stages);
}

/// The shared matrix is reduced once, after the backward of the embedding.
#[test]
fn the_offloaded_gradient_of_a_tied_matrix_comes_back_bit_for_bit() {
    let config = ReferenceConfig { tie_word_embeddings: true, ..CONFIG };
    let problem = Problem { rule: Rule::AdamW(ADAMW), ..problem(config, packed_batch()) };
    let layouts = [layout(2, 2, 2), Layout { accumulation: 2, ..layout(2, 1, 3) }];
    assert_same_when_offloaded(&problem, &json!({}), &["offload_optimizer"], layouts);
}

#[test]
fn offloaded_parameters_come_back_bit_for_bit() {
    let frozen = json!({ "ulysses": {
        "activation_checkpointing": true, "parameter_groups": [{ "match": "mlp", "frozen": true }],
    } });
    for extra in [json!({}), json!({ "bf16": { "enabled": true } }), frozen] {
        let features: [&[&str]; 2] = [&["offload_param"], &["offload_param", "offload_optimizer"]];
        assert_offload_keeps_bits(&extra, &features, partitioned().filter(|layout| layout.stage == 3));
    }
}

#[test]
fn tiles_that_do_not_divide_the_tokens_change_only_the_order_of_sums() {
    let features = [(1, false), (5, false), (5, true), (1000, false)].map(|(tile, checkpointing)| {
        let ulysses = json!({ "tile_tokens": tile, "activation_checkpointing": checkpointing });
        (json!({ "ulysses": ulysses }), 4)
    });
    assert_as_exact_as_plain(3, &features);
}

#[test]
fn one_tile_of_all_tokens_does_not_change_a_bit() {
    assert_same_bits(&[(json!({ "ulysses": { "tile_tokens": 1000 } }), json!({}))]);
}

#[test]
fn head_chunks_change_only_the_order_of_sums() {
    let features = [(2, 4), (3, 2), (4, 2)].into_iter().flat_map(|(chunks, max_sp)| {
        [false, true].map(|checkpointing| {
            let ulysses = json!({ "head_chunks": chunks, "activation_checkpointing": checkpointing });
            (json!({ "ulysses": ulysses }), max_sp)
        })
    });
    assert_as_exact_as_plain(1, &features.collect::<Vec<_>>());
}

#[test]
fn recomputing_head_chunks_in_tiles_does_not_change_a_bit() {
    let chunked = |checkpointing| {
        json!({ "ulysses": {
            "head_chunks": 2, "tile_tokens": 7, "activation_checkpointing": checkpointing,
        } })
    };
    assert_same_bits(&[(chunked(true), chunked(false))]);
}

/// Two, three and all KV heads per chunk; chunks whose heads two, three and four ranks cannot share evenly; each way to
/// save a chunk's state.
#[test]
fn overlapping_the_exchange_does_not_change_a_bit() {
    let few_kv_heads = ReferenceConfig { num_heads: 12, num_kv_heads: 3, qk_norm: true, ..CONFIG };
    let saving = [
        json!({}),
        json!({ "activation_checkpointing": true }),
        json!({ "activation_checkpointing": true, "save_attention_output": false }),
        json!({ "activation_checkpointing": true, "activation_checkpointing_interval": 2, "tile_tokens": 7 }),
    ];
    let heads = [
        (&CONFIG, 2, 3),
        (&CONFIG, 2, 4),
        (&CONFIG, 3, 2),
        (&CONFIG, 4, 2),
        (&few_kv_heads, 2, 4),
        (&few_kv_heads, 3, 3),
    ];
    let cases = heads.into_iter().flat_map(|heads| saving.iter().map(move |saving| (heads, saving)));
    for ((config, chunks, sp), saving) in sampled(cases, |((config, chunks, sp), saving)| {
        let num_heads = config.num_heads;
        axes![num_heads, chunks, sp, saving]
    }) {
        let problem = Problem { steps: 1, ..problem(config.clone(), packed_batch()) };
        let with = |overlap: bool| {
            let mut ulysses = json!({ "head_chunks": chunks, "overlap_exchange": overlap });
            ulysses.as_object_mut().unwrap().extend(saving.as_object().unwrap().clone());
            bits(&run(&problem, json!({ "ulysses": ulysses }), layout(1, sp, 0))).unwrap()
        };
        assert!(with(true) == with(false), "{chunks} chunks, sp {sp}, {saving}: the overlap changes bits");
    }
}
