//! Pipeline parallelism never changes the math: layouts with stages against the independent f64 reference.

use super::linear_attention::{KIMI, NEXT};
use crate::support::compare::{assert_all_close, assert_scalar_close};
use crate::support::doubles::{Fault, FaultyGroup, FaultyPipeline, OneStream, PipelineFault};
use crate::support::mesh_run::{
    Doubles, Layout, Problem, Rule, assert_matches, by_name, global_batch, layout, matches, micro_batches,
    on_mesh,
};
use crate::support::problems::{ADAMW, CONFIG, LAMB, packed_batch, problem};
use crate::support::reference::{Family, ReferenceConfig};
use crate::support::sample::{axes, sampled};
use candle_core::Tensor;
use serde_json::json;
use std::sync::Arc;
use ulysses::checkpoint::{Checkpoint, DataCursor, SaveOptions, step_name};
use ulysses::comm::{LaunchOptions, PipelineGroups, TrainingGroups};
use ulysses::engine::RunRecord;
use ulysses::kernels::attention::FlashAttention;

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
        [2, 2, 1, 2],
        [3, 2, 1, 1],
        [4, 1, 1, 1],
        [5, 1, 1, 1],
    ];
    meshes.into_iter().flat_map(|mesh| {
        (0..=3)
            .flat_map(move |stage| [1, 3].map(|accumulation| Layout { accumulation, ..on_pp(mesh, stage) }))
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

fn tied(rule: Rule, clip: Option<f64>) -> Problem {
    Problem { rule, clip, ..problem(ReferenceConfig { tie_word_embeddings: true, ..DEEP }, packed_batch()) }
}

fn deep(rule: Rule, clip: Option<f64>) -> Problem {
    Problem { rule, clip, ..problem(DEEP, packed_batch()) }
}

#[test]
fn stages_train_as_whole_models_on_every_mesh_stage_and_accumulation() {
    check_each(&[deep(Rule::Sgd { lr: 0.1 }, Some(0.25)), deep(Rule::AdamW(ADAMW), None)], 5e-5);
}

#[test]
fn tied_embeddings_are_summed_over_both_stages_and_counted_once() {
    // Of three micro batches, the first one has no label.
    let sgd = Problem { batch: packed_batch().mask_rows(0..3), ..tied(Rule::Sgd { lr: 0.1 }, Some(0.25)) };
    check_each(&[sgd, tied(Rule::AdamW(ADAMW), Some(0.25))], 5e-5);
}

#[test]
fn norms_of_whole_tensors_are_those_of_their_stage() {
    check_each(&[deep(Rule::Lamb(LAMB), None), tied(Rule::Lamb(LAMB), Some(0.25))], 2e-4);
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
fn recomputation_offload_tiles_and_other_families_change_nothing() {
    let offloaded = json!({
        "ulysses": { "activation_checkpointing": true }, "activation_checkpointing": { "cpu_checkpointing": true },
    });
    let options = [
        (Family::Llama, offloaded),
        (Family::Gemma3, json!({ "ulysses": { "activation_checkpointing": true } })),
        (Family::Granite, json!({ "ulysses": { "tile_tokens": 3, "loss_tile_tokens": 5 } })),
    ];
    let problems = options.map(|(family, extra)| {
        let sliding_window = (family == Family::Gemma3).then_some(5);
        let tie_word_embeddings = family == Family::Gemma3;
        let config = ReferenceConfig { family, sliding_window, tie_word_embeddings, ..DEEP };
        Problem { extra, ..problem(config, packed_batch()) }
    });
    check_each(&problems, 2e-5);
}

/// Weights of every kind: `[out, in]` and `[in, out]`, parts of one parameter, of attention, linear attention and convolutions;
/// in tiles, in head chunks, and recomputed.
#[test]
fn gradients_of_weights_may_have_a_pass_of_their_own() {
    let zero_bubble = |ulysses: serde_json::Value| {
        let mut extra = json!({ "ulysses": { "pipeline": { "schedule": "zero_bubble" } } });
        extra["ulysses"].as_object_mut().unwrap().extend(ulysses.as_object().unwrap().clone());
        extra
    };
    let of = |family, ulysses| {
        let tie_word_embeddings = matches!(family, Family::Gemma3 | Family::Gpt2 | Family::Lfm2);
        let sliding_window = (family == Family::Gemma3).then_some(5);
        let partial_rotary_factor = if family.has_delta_net() { 0.5 } else { CONFIG.partial_rotary_factor };
        let (num_heads, num_kv_heads) = match family {
            Family::Gpt2 | Family::GptNeoX => (6, 6),
            _ => (CONFIG.num_heads, CONFIG.num_kv_heads),
        };
        let config = ReferenceConfig {
            family,
            tie_word_embeddings,
            sliding_window,
            num_layers: 3,
            partial_rotary_factor,
            num_heads,
            num_kv_heads,
            ..CONFIG
        };
        let config = match family {
            Family::KimiLinear => KIMI,
            Family::Qwen3Next => NEXT,
            _ => config,
        };
        Problem { clip: Some(0.25), extra: zero_bubble(ulysses), ..problem(config, packed_batch()) }
    };
    let problems = [
        of(Family::Llama, json!({})),
        of(Family::Gemma3, json!({ "activation_checkpointing": true, "head_chunks": 2 })),
        of(Family::Gpt2, json!({ "tile_tokens": 3 })),
        of(Family::GptNeoX, json!({ "activation_checkpointing": true })),
        of(Family::Qwen35, json!({})),
        of(Family::KimiLinear, json!({ "tile_tokens": 5 })),
        of(Family::Qwen3Next, json!({ "tile_tokens": 5 })),
        of(Family::Lfm2, json!({ "activation_checkpointing": true })),
        of(Family::NemotronH, json!({ "activation_checkpointing": true, "tile_tokens": 5 })),
    ];
    check_each(&problems, 5e-5);
}

/// The last stage has run its first backward pass, but for the gradients of weights.
#[test]
fn an_engine_that_still_owes_gradients_after_an_error_is_unusable() {
    for (schedule, is_usable) in [("1f1b", true), ("zero_bubble", false)] {
        let extra = json!({ "ulysses": { "pipeline": { "schedule": schedule } } });
        let problem = Problem { extra, ..deep(Rule::Sgd { lr: 0.1 }, None) };
        let config = problem.json_config(Layout { accumulation: 4, ..on_pp([2, 1, 1, 1], 2) }, 8).unwrap();
        let global = global_batch(&problem.batch).unwrap();
        let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
            let mut first = micro_batches(&global, &engine)?.into_iter().take(1);
            let failed = engine.train_batch(|| first.next().ok_or("cannot be read")).unwrap_err();
            Ok((failed.to_string(), engine.step().map_err(|error| error.to_string())))
        });
        let ranks = ranks.unwrap();
        assert!(ranks.iter().all(|(failed, _)| failed.contains("cannot be read")), "{ranks:?}");
        assert_eq!([0, 1].map(|rank: usize| ranks[rank].1.is_ok()), [true, is_usable], "{schedule}");
    }
}

#[test]
fn schedules_and_divisions_of_layers_give_the_same_bits() {
    let run = |pipeline: serde_json::Value, stage: u8| {
        let extra = json!({ "ulysses": { "pipeline": pipeline } });
        let problem = Problem { extra, ..tied(Rule::AdamW(ADAMW), Some(0.25)) };
        let outcome = problem.run(Layout { accumulation: 4, ..on_pp([2, 1, 2, 1], stage) }).unwrap();
        by_name(&outcome.gradients)
    };
    let expected = run(json!({ "schedule": "1f1b" }), 2);
    for pipeline in [
        json!({ "schedule": "gpipe" }),
        json!({ "layers_per_stage": [1, 4] }),
        json!({ "virtual_stages": 2 }),
        json!({ "virtual_stages": 2, "layers_per_stage": [1, 2, 1, 1] }),
    ] {
        assert_all_close(&pipeline.to_string(), &run(pipeline.clone(), 2), &expected, 0.0);
    }
    // From stage 2 on, norms of several micro batches are reduced together.
    let expected = run(json!({ "schedule": "1f1b" }), 1);
    assert_all_close("zero bubble", &run(json!({ "schedule": "zero_bubble" }), 1), &expected, 0.0);
}

/// There a message waits for both of its ranks, and their later ones wait for it.
#[test]
fn stages_do_not_wait_for_each_other_on_one_stream() {
    fn on_one_stream(groups: TrainingGroups) -> TrainingGroups {
        let wrap = |groups: PipelineGroups| PipelineGroups { pp: OneStream::wrap(groups.pp), ..groups };
        TrainingGroups { pipeline: groups.pipeline.map(wrap), ..groups }
    }
    for (pipeline, mesh, accumulation) in [
        (json!({ "schedule": "gpipe" }), [3, 1, 1, 1], 4),
        (json!({ "schedule": "1f1b" }), [3, 1, 2, 1], 4),
        (json!({ "schedule": "zero_bubble" }), [3, 1, 1, 2], 4),
        (json!({ "virtual_stages": 2 }), [2, 2, 1, 1], 4),
        (json!({ "virtual_stages": 2 }), [3, 1, 1, 2], 3),
        (json!({ "virtual_stages": 3 }), [2, 1, 1, 1], 2),
    ] {
        let extra = json!({ "ulysses": { "pipeline": pipeline } });
        let config = ReferenceConfig { num_layers: 6, tie_word_embeddings: true, ..CONFIG };
        let problem = Problem { extra, steps: 2, ..problem(config, packed_batch()) };
        let gradients = |groups| {
            let layout = Layout { accumulation, ..on_pp(mesh, 3) };
            let outcome = problem.run_with(layout, &Doubles { groups, ..Doubles::default() }).unwrap();
            by_name(&outcome.gradients)
        };
        let expected = gradients(|groups| groups);
        assert_all_close(&pipeline.to_string(), &gradients(on_one_stream), &expected, 0.0);
    }
}

#[test]
fn ranks_with_several_stages_train_as_whole_models() {
    let extra = json!({ "ulysses": { "pipeline": { "virtual_stages": 2 } } });
    let of = |tie_word_embeddings, rule, clip| {
        let config = ReferenceConfig { num_layers: 7, tie_word_embeddings, ..CONFIG };
        Problem { rule, clip, extra: extra.clone(), ..problem(config, packed_batch()) }
    };
    let problems = [of(false, Rule::Sgd { lr: 0.1 }, Some(0.25)), of(true, Rule::AdamW(ADAMW), Some(0.25))];
    let expected = problems.each_ref().map(|problem| problem.reference().unwrap());
    let meshes = [[2, 1, 1, 1], [2, 2, 1, 1], [2, 1, 2, 1], [2, 1, 1, 2], [3, 1, 1, 1], [3, 1, 2, 1]];
    let layouts = meshes.into_iter().flat_map(|mesh| {
        (0..=3).flat_map(move |stage| {
            // As many micro batches as ranks: none is in a steady state; and more.
            [1, 2].map(|groups| Layout { accumulation: groups * mesh[0], ..on_pp(mesh, stage) })
        })
    });
    let cases = layouts.flat_map(|layout| [0, 1].map(|number| (number, layout)));
    for (number, layout) in sampled(cases, |(number, layout)| [axes![number], layout.axes()].concat()) {
        let outcome = problems[number].run(layout).unwrap();
        assert_matches(&outcome, &expected[number], 5e-5, &format!("problem {number}, {layout:?}"));
    }
}

#[test]
fn frozen_parameters_and_stages_without_trained_ones_match() {
    let lower = ["layers.0.", "layers.1.", "layers.2.", "embed_tokens"];
    for (patterns, rule, stage) in [
        (&["embed_tokens"][..], Rule::Sgd { lr: 0.1 }, 0),
        (&lower, Rule::Lamb(LAMB), 3),
        (&["mlp", "norm"], Rule::Lamb(LAMB), 1),
    ] {
        let groups: Vec<_> = patterns.iter().map(|name| json!({ "match": name, "frozen": true })).collect();
        let extra = json!({ "ulysses": { "parameter_groups": groups } });
        let problem = Problem { extra, ..tied(rule, Some(0.25)) };
        let alone = problem.run(layout(1, 1, 0)).unwrap();
        let outcome = problem.run(Layout { accumulation: 2, ..on_pp([2, 2, 1, 1], stage) }).unwrap();
        let names = |tensors: &[(String, Tensor)]| tensors.iter().map(|of| of.0.clone()).collect::<Vec<_>>();
        assert_eq!(names(&outcome.gradients), names(&alone.gradients), "{patterns:?}");
        assert_eq!(names(&outcome.parameters), names(&alone.parameters), "{patterns:?}");
        let expected = by_name(&alone.parameters);
        assert_all_close(&format!("{patterns:?}"), &by_name(&outcome.parameters), &expected, 2e-4);
    }
}

#[test]
fn an_overflow_on_one_stage_skips_the_step_on_all() {
    let extra = json!({ "fp16": { "enabled": true, "loss_scale": 1e30 } });
    let problem = Problem { extra, ..tied(Rule::AdamW(ADAMW), None) };
    for stage in [0, 2] {
        let outcome = problem.run(Layout { accumulation: 2, ..on_pp([3, 1, 1, 1], stage) }).unwrap();
        assert!(outcome.reports.iter().all(|report| report.skipped && report.overflow), "stage {stage}");
        assert_eq!(outcome.reports.len(), problem.steps);
    }
}

#[test]
fn a_tied_gradient_without_its_sum_is_detected() {
    fn with(groups: TrainingGroups, fault: Fault) -> TrainingGroups {
        let wrap = |groups: PipelineGroups| PipelineGroups {
            tied: groups.tied.map(|tied| FaultyGroup::wrap(tied, fault)),
            ..groups
        };
        TrainingGroups { pipeline: groups.pipeline.map(wrap), ..groups }
    }
    let problem = tied(Rule::Sgd { lr: 0.1 }, None);
    let expected = problem.reference().unwrap();
    let is_accepted = |groups: fn(TrainingGroups) -> TrainingGroups, stage| {
        let doubles = Doubles { groups, ..Doubles::default() };
        let outcome = problem.run_with(on_pp([3, 2, 1, 1], stage), &doubles).unwrap();
        matches(&outcome, &expected, 2e-5)
    };
    for stage in [0, 3] {
        assert!(is_accepted(|groups| groups, stage));
        assert!(!is_accepted(|groups| with(groups, Fault::SkipsTheSum), stage));
        assert!(!is_accepted(|groups| with(groups, Fault::ScalesByWorldSize), stage));
    }
}

#[test]
fn wrong_messages_and_norms_of_stages_are_detected() {
    fn with(groups: TrainingGroups, fault: PipelineFault) -> TrainingGroups {
        let wrap =
            |groups: PipelineGroups| PipelineGroups { pp: FaultyPipeline::wrap(groups.pp, fault), ..groups };
        TrainingGroups { pipeline: groups.pipeline.map(wrap), ..groups }
    }
    let problem = deep(Rule::Sgd { lr: 0.1 }, Some(0.25));
    let expected = problem.reference().unwrap();
    for stage in [0, 3] {
        let is_accepted = |groups| {
            let layout = Layout { accumulation: 4, ..on_pp([2, 1, 1, 1], stage) };
            let outcome = problem.run_with(layout, &Doubles { groups, ..Doubles::default() }).unwrap();
            matches(&outcome, &expected, 2e-5)
        };
        assert!(is_accepted(|groups| groups), "stage {stage}");
        let faults: [fn(TrainingGroups) -> TrainingGroups; 3] = [
            |groups| with(groups, PipelineFault::SendsThePreviousMessage),
            |groups| with(groups, PipelineFault::HalvesMessages),
            |groups| with(groups, PipelineFault::SkipsTheNorm),
        ];
        for (number, fault) in faults.into_iter().enumerate() {
            assert!(!is_accepted(fault), "fault {number} at stage {stage}");
        }
    }
}

/// The first rank goes backward with the state of another micro batch than the second one.
#[test]
fn the_saved_state_of_another_micro_batch_is_detected() {
    let problem = deep(Rule::Sgd { lr: 0.1 }, None);
    let gradients = |swaps: bool| {
        let layout = Layout { accumulation: 2, ..on_pp([2, 1, 1, 1], 0) };
        let config = problem.json_config(layout, 8).unwrap();
        let global = global_batch(&problem.batch).unwrap();
        let ranks = on_mesh(&config, &LaunchOptions::default(), |rank, groups| {
            let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
            let losses = micro_batches(&global, &engine)?.into_iter().map(|batch| engine.forward(&batch));
            let mut losses = losses.collect::<Result<Vec<_>, _>>()?;
            if swaps && rank == 0 {
                losses.swap(0, 1);
            }
            losses.into_iter().try_for_each(|loss| engine.backward(loss))?;
            Ok(by_name(&engine.gather_gradients()?))
        });
        ranks.unwrap().swap_remove(0)
    };
    let (right, swapped) = (gradients(false), gradients(true));
    let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let differs = |name: &str| {
        let [right, swapped] = [&right, &swapped].map(|gradients| values(&gradients[name]));
        right.iter().zip(&swapped).any(|(a, b)| (a - b).abs() > 1e-3 * a.abs())
    };
    assert!(differs("model.layers.0.mlp.up_proj.weight"), "of the first stage");
    assert!(!differs("model.layers.4.mlp.up_proj.weight"), "of the second stage");
}

#[test]
fn tied_stages_are_saved_once_load_on_one_rank_and_evaluate_alike() {
    let dir = tempfile::tempdir().unwrap();
    let run = |layout: Layout, virtual_stages: usize, loads: bool| {
        let extra = json!({ "ulysses": { "pipeline": { "virtual_stages": virtual_stages } } });
        let problem = Problem { extra, ..tied(Rule::AdamW(ADAMW), Some(0.25)) };
        let global = global_batch(&problem.batch).unwrap();
        let config = problem.json_config(layout, 8).unwrap();
        let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let world = groups.pipeline.as_ref().map_or(groups.dp.clone(), |groups| groups.pp.clone());
            let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
            let micro_batches = micro_batches(&global, &engine)?;
            if loads {
                engine.load_checkpoint(&Checkpoint::open(&dir.path().join(step_name(1)))?)?;
            }
            // By hand, all stages in the same order: as with one rank.
            for micro_batch in &micro_batches {
                let loss = engine.forward(micro_batch)?;
                engine.backward(loss)?;
            }
            engine.step()?;
            if !loads {
                let group = world.split("checkpoint", Some(0), world.rank())?.unwrap();
                let mut saver = engine.saver(group, dir.path(), SaveOptions::default())?;
                engine.save_checkpoint(&mut saver, record())?;
                saver.finish()?;
                let mut next = micro_batches.iter().cloned();
                engine.train_batch(|| next.next().ok_or("a step has its micro batches"))?;
            }
            let loss = engine.evaluate(&micro_batches[0])?;
            engine.check_replicas()?;
            Ok((loss.sum, loss.valid_tokens, by_name(&engine.gather_parameters()?)))
        });
        ranks.unwrap().swap_remove(0)
    };
    let two = on_pp([2, 1, 1, 1], 3);
    for (saving, of_rank) in [(on_pp([3, 1, 1, 1], 1), 1), (layout(1, 1, 0), 1), (two, 2)] {
        let saving = Layout { accumulation: 2, ..saving };
        let (loss, tokens, parameters) = run(saving, of_rank, false);
        for (loading, virtual_stages) in
            [(layout(1, 1, 0), 1), (on_pp([2, 1, 1, 1], 0), 1), (on_pp([5, 1, 1, 1], 2), 1), (two, 2)]
        {
            let label = format!("{saving:?}, {of_rank} stages, to {loading:?}, {virtual_stages}");
            let (again, of_tokens, resumed) =
                run(Layout { accumulation: 2, ..loading }, virtual_stages, true);
            assert_scalar_close(&label, again, loss, 2e-5);
            assert_eq!(of_tokens, tokens, "{label}");
            assert_all_close(&label, &resumed, &parameters, 5e-5);
        }
        std::fs::remove_dir_all(dir.path().join(step_name(1))).unwrap();
    }
}

fn record() -> RunRecord {
    let data = DataCursor { samples_consumed: 8, seed: 1, seq_len: 22, num_sequences: 8, data_hash: None };
    RunRecord {
        run_id: "a-run".into(),
        model: serde_json::Value::Null,
        source: None,
        data,
        evaluations: Default::default(),
    }
}

#[test]
fn more_stages_than_layers_are_refused() {
    let problem = problem(CONFIG, packed_batch());
    let error = format!("{:#}", problem.run(on_pp([3, 1, 1, 1], 0)).unwrap_err());
    assert!(error.contains("pp") && error.contains('2') && error.contains("layers"), "{error}");
}
