//! ZeRO decides where tensors are stored and never what is computed: the stages agree bit for bit, and so do
//! repeated runs.

use crate::support::compare::{assert_all_close, assert_scalar_close};
use crate::support::mesh_run::{
    Layout, Problem, Rule, bits, by_name, global_batch, layout, micro_batches, on_mesh,
};
use crate::support::problems::{ADAMW, CONFIG, main_problem, packed_batch, problem};
use crate::support::reference::{Batch, ReferenceConfig};
use crate::support::sample::{Sample, axes, sampled};
use std::sync::Arc;
use ulysses::comm::thread::LaunchOptions;
use ulysses::data::DataError;
use ulysses::engine::BatchOutcome;
use ulysses::kernels::attention::FlashAttention;

const MESHES: [(usize, usize); 6] = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (4, 2)];

const CLIP: f64 = 0.25;

/// SGD and AdamW, with and without clipping, with a separate and a tied head.
fn problems() -> impl Iterator<Item = (String, Problem)> {
    let rules = [Rule::Sgd { lr: 0.1 }, Rule::AdamW(ADAMW)];
    let clipped = rules.into_iter().flat_map(|rule| [None, Some(CLIP)].map(|clip| (rule, clip)));
    let all = clipped.flat_map(|(rule, clip)| [false, true].map(|tied| (rule, clip, tied)));
    all.map(|(rule, clip, tied)| {
        let config = ReferenceConfig { tie_word_embeddings: tied, ..CONFIG };
        let label = format!("{rule:?} clip {clip:?} tied {tied}");
        (label, Problem { rule, clip, ..problem(config, packed_batch()) })
    })
}

/// A sample of the problems on layouts.
#[track_caller]
fn on(layouts: impl IntoIterator<Item = Layout>) -> Sample<(String, Problem, Layout)> {
    let on_layout = |layout| problems().map(move |(name, problem)| (name, problem, layout));
    let cases = layouts.into_iter().flat_map(on_layout);
    sampled(cases, |(_, Problem { rule, clip, config, .. }, layout)| {
        let tied = config.tie_word_embeddings;
        [axes![rule, clip, tied], layout.axes()].concat()
    })
}

fn all_stages(problem: &Problem, layout: Layout) -> [BatchOutcome; 4] {
    [0, 1, 2, 3].map(|stage| problem.run(Layout { stage, ..layout }).unwrap())
}

/// Compares losses, norms, gradients and parameters bit for bit. The first comparison only tells which tensor
/// differs.
#[track_caller]
fn assert_identical(label: &str, actual: &BatchOutcome, expected: &BatchOutcome) {
    assert_close(label, actual, expected, 0.0);
    assert!(bits(actual).unwrap() == bits(expected).unwrap(), "{label}: equal values of different bits");
}

#[track_caller]
fn assert_close(label: &str, actual: &BatchOutcome, expected: &BatchOutcome, tolerance: f64) {
    for (step, (report, expected)) in actual.reports.iter().zip(&expected.reports).enumerate() {
        assert_scalar_close(&format!("{label}: loss {step}"), report.loss, expected.loss, tolerance);
        assert_scalar_close(
            &format!("{label}: norm {step}"),
            report.grad_norm,
            expected.grad_norm,
            tolerance,
        );
    }
    let (of, than) = (by_name(&actual.gradients), by_name(&expected.gradients));
    assert_all_close(&format!("{label}: gradient"), &of, &than, tolerance);
    let (of, than) = (by_name(&actual.parameters), by_name(&expected.parameters));
    assert_all_close(&format!("{label}: parameter"), &of, &than, tolerance);
}

#[test]
fn without_accumulation_all_four_stages_give_the_same_bits() {
    for (name, problem, layout) in on(MESHES.map(|(dp, sp)| layout(dp, sp, 0))) {
        let Layout { dp, sp, .. } = layout;
        let runs = all_stages(&problem, layout);
        assert!(runs[0].reports[0].grad_norm > 2.0 * CLIP, "{name}: clipping must bite");
        for stage in 1..=3 {
            assert_identical(&format!("{name} {dp}x{sp} stage {stage}"), &runs[stage], &runs[0]);
        }
    }
}

#[test]
fn with_accumulation_stages_0_and_1_agree_to_the_bit_and_so_do_2_and_3() {
    let accumulations = [2, 4, 2, 4, 2, 2];
    let meshes = MESHES.into_iter().zip(accumulations);
    let layouts = meshes.map(|((dp, sp), accumulation)| Layout { accumulation, ..layout(dp, sp, 0) });
    for (name, mut problem, layout) in on(layouts) {
        // AdamW divides a gradient by |gradient| + eps. With an eps of 1e-8, rounding of a sum (below 1e-6
        // here) can reverse the step of a small gradient. An eps above that error, and far below most
        // gradients (2e-3 rms when clipped), limits its effect on a step.
        if let Rule::AdamW(adamw) = &mut problem.rule {
            adamw.eps = 1e-5;
        }
        let label = format!("{name} {layout:?}");
        let [zero, one, two, three] = all_stages(&problem, layout);
        assert_identical(&format!("{label}: 1 and 0"), &one, &zero);
        assert_identical(&format!("{label}: 3 and 2"), &three, &two);
        // First over dp, or first over micro steps: another order of summation.
        assert_close(&format!("{label}: 2 and 0"), &two, &zero, 1e-6);
    }
}

#[test]
fn the_same_run_twice_gives_the_same_bits() {
    let problem = main_problem(Rule::AdamW(ADAMW), Some(CLIP));
    let accumulated = Layout { accumulation: 2, ..layout(2, 3, 3) };
    let over_dp = [layout(1, 2, 0), layout(2, 3, 1), layout(4, 2, 2), layout(2, 2, 3), accumulated];
    let over_sp = [layout(1, 4, 1), layout(2, 2, 2), layout(1, 3, 3), accumulated];
    let over_sp = over_sp.map(|layout| Layout { spans_sp: true, ..layout });
    for layout in over_dp.into_iter().chain(over_sp) {
        let (first, second) = (problem.run(layout).unwrap(), problem.run(layout).unwrap());
        assert_identical(&format!("{layout:?}"), &second, &first);
    }
}

#[test]
fn threads_within_a_rank_change_no_bit() {
    // Wide enough for every op to divide its work.
    let config = ReferenceConfig {
        vocab_size: 512,
        hidden_size: 128,
        intermediate_size: 256,
        num_layers: 1,
        head_dim: 16,
        ..CONFIG
    };
    let mut problem = Problem { clip: Some(CLIP), ..problem(config, Batch::random(512, 2, 512, 7)) };
    problem.steps = 2;
    for layout in [layout(1, 1, 0), layout(1, 2, 3), layout(2, 1, 2)] {
        let mut run = |threads| {
            problem.threads_per_rank = threads;
            problem.run(layout).unwrap()
        };
        let (one, two) = (run(1), run(2));
        assert_identical(&format!("{layout:?}"), &two, &one);
    }
}

/// Elements of every unit: embedding, layers, head.
fn unit_numels(config: &ReferenceConfig) -> Vec<usize> {
    let ReferenceConfig { vocab_size, hidden_size: d, intermediate_size: f, head_dim, .. } = *config;
    let (q, kv) = (config.num_heads * head_dim, config.num_kv_heads * head_dim);
    let layer = 2 * d * (q + kv) + 3 * d * f + 2 * d;
    [vec![vocab_size * d], vec![layer; config.num_layers], vec![d + vocab_size * d]].concat()
}

#[test]
fn the_zero_world_of_a_live_engine_is_dp_size_for_every_sp() {
    let mut problem = main_problem(Rule::AdamW(ADAMW), None);
    // Five ranks divide none of the units evenly; dp 5 also needs sequences that it divides.
    problem.batch = Batch::random(CONFIG.vocab_size, 20, 8, 1);
    let global = global_batch(&problem.batch).unwrap();
    for (dp, sp) in [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (4, 2), (5, 1), (5, 2)] {
        for stage in 0..=3 {
            let config = problem.json_config(layout(dp, sp, stage), 20).unwrap();
            let seen = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
                let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
                let mut batches = micro_batches(&global, &engine)?.into_iter();
                engine.train_batch(|| Ok::<_, DataError>(batches.next().unwrap()))?;
                Ok((engine.zero().world_size(), engine.zero().state_numel()))
            });
            let partitions = unit_numels(&CONFIG).into_iter().map(|numel| numel.div_ceil(dp));
            let owned = partitions.sum::<usize>() * if stage == 0 { dp } else { 1 };
            assert_eq!(seen.unwrap(), vec![(dp, owned); dp * sp], "{dp}x{sp} stage {stage}");
        }
    }
}
