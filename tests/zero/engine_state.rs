//! The engine's state between calls: recycled storage, micro batches of many lengths, and errors part-way.

use crate::support::device::test_device;
use crate::support::doubles::{Fault, FaultyGroup, Hooked, Pass};
use crate::support::mesh_run::{
    Layout, Problem, Rule, by_name, global_batch, layout, llama, llama_config, micro_batches, on_mesh,
};
use crate::support::problems::{ADAMW, CONFIG, main_problem, packed_batch};
use crate::support::reference::Batch;
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use ulysses::checkpoint::SaveOptions;
use ulysses::comm::{LaunchOptions, TrainingGroups};
use ulysses::config::Config;
use ulysses::data::{DataError, MicroBatch};
use ulysses::engine::{Engine, EngineError, PhaseTimes, StepTimes};
use ulysses::kernels::attention::FlashAttention;
use ulysses::model::{Model, ModelConfig, RandomWeights};
use ulysses::nn::{AutogradLayer, BlockContext, Init, Layer, LayerContext, LayerError, ParameterSpec, Saved};

const ROWS: usize = 8;

fn problem() -> Problem {
    main_problem(Rule::Sgd { lr: 0.1 }, None)
}

/// Runs `work` on every rank, with the rank's engine and micro batches.
fn on_ranks<T: Send>(
    problem: &Problem,
    layout: Layout,
    work: impl Fn(&mut Engine, &[MicroBatch]) -> Result<T> + Sync,
) -> Vec<T> {
    let config = problem.json_config(layout, ROWS).unwrap();
    let global = global_batch(&problem.batch).unwrap();
    let run = |_: usize, groups| {
        let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
        let batches = micro_batches(&global, &engine)?;
        work(&mut engine, &batches)
    };
    on_mesh(&config, &LaunchOptions::default(), run).unwrap()
}

fn micro_step(engine: &mut Engine, batch: &MicroBatch) -> Result<()> {
    let loss = engine.forward(batch)?;
    Ok(engine.backward(loss)?)
}

/// A Llama between a block that uses autograd and a layer that saves its output.
fn mixed_model(config: &ModelConfig) -> Model {
    let mut model = llama(config);
    let double = |_: &[Tensor], x: &Tensor, _: &BlockContext<'_>| x + x.sin()?;
    model.layers.insert(0, Box::new(AutogradLayer::new("sine", vec![], double)));
    model.layers.push(Box::new(Tanh));
    model
}

#[test]
fn recycled_storage_does_not_grow_from_step_to_step() {
    let checkpointing = serde_json::json!({ "ulysses": { "activation_checkpointing": true } });
    for extra in [serde_json::json!({}), checkpointing] {
        for model in [llama, mixed_model] {
            let problem = Problem { model, extra: extra.clone(), ..problem() };
            for layout in [layout(1, 1, 0), layout(1, 2, 0), layout(2, 2, 3)] {
                on_ranks(&problem, layout, |engine, batches| {
                    let mut held = Vec::new();
                    for _ in 0..8 {
                        micro_step(engine, &batches[0])?;
                        engine.step()?;
                        held.push(engine.workspace().free_bytes());
                    }
                    assert!(held[0] > 0);
                    assert_eq!(held[2..], [held[2]; 6], "{layout:?}");
                    engine.evaluate(&batches[0])?;
                    assert_eq!(engine.workspace().free_bytes(), held[2], "{layout:?}, after an evaluation");
                    Ok(())
                });
            }
        }
    }
}

/// `y = tanh(x)`, whose gradient needs only `y`: saves the same tensor that it returns, and allocates its own
/// result from the workspace.
struct Tanh;

impl Layer for Tanh {
    fn name(&self) -> &str {
        "tanh"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &[]
    }

    fn forward(&self, _: &[Tensor], x: &Tensor, _: &LayerContext) -> Result<(Tensor, Saved), LayerError> {
        let y = x.tanh()?;
        Ok((y.clone(), Saved::new(y, 0)))
    }

    fn backward(
        &self,
        _: &[Tensor],
        saved: Saved,
        dy: Tensor,
        _: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let y: Tensor = saved.downcast("tanh")?;
        let dx = ctx.workspace().alloc(y.dims())?;
        ulysses::kernels::elementwise::fill(&dx, f32::NAN)?;
        let gradient = (dy * y.sqr()?.affine(-1.0, 1.0)?)?;
        ulysses::kernels::strided_copy::copy(&gradient, &dx)?;
        Ok(dx)
    }
}

#[test]
fn a_layer_may_keep_its_own_output() {
    let models: [fn(&ModelConfig) -> Model; 2] =
        [|config| with_layers(config, || Box::new(Tanh)), |config| with_layers(config, autograd_tanh)];
    for checkpointing in [false, true] {
        let extra = serde_json::json!({ "ulysses": { "activation_checkpointing": checkpointing } });
        let [got, expected] = models.map(|model| {
            let problem = Problem { extra: extra.clone(), model, ..problem() };
            problem.run(layout(1, 2, 0)).unwrap()
        });
        let (got, expected) = (by_name(&got.gradients), by_name(&expected.gradients));
        crate::support::compare::assert_all_close("gradient", &got, &expected, 1e-5);
    }
}

#[test]
fn layers_of_one_name_train_but_cannot_be_saved() {
    fn half() -> Box<dyn Layer> {
        let half = |_: &[Tensor], x: &Tensor, _: &BlockContext<'_>| x * 0.5;
        Box::new(AutogradLayer::new("half", vec![], half))
    }
    let problem = Problem { model: |config| with_layers(config, half), ..problem() };
    on_ranks(&problem, layout(1, 1, 0), |engine, batches| {
        micro_step(engine, &batches[0])?;
        let directory = tempfile::tempdir()?;
        let saver = engine.saver(engine.dp_group().clone(), directory.path(), SaveOptions::default());
        let error = saver.err().unwrap().to_string();
        assert!(error.contains("are called \"half\""), "{error}");
        Ok(())
    });
}

/// A Llama with one more layer between its own, and one after them.
fn with_layers(config: &ModelConfig, layer: fn() -> Box<dyn Layer>) -> Model {
    let mut model = llama(config);
    model.layers.insert(1, layer());
    model.layers.push(layer());
    model
}

fn autograd_tanh() -> Box<dyn Layer> {
    Box::new(AutogradLayer::new("tanh", vec![], |_: &[Tensor], x: &Tensor, _: &BlockContext<'_>| x.tanh()))
}

#[test]
fn micro_batches_of_different_lengths_weigh_by_their_tokens() {
    // Sequences of 16 and of 22 tokens: as two micro steps in either order, and on two dp ranks.
    let lengths = [16, 22];
    let rows = lengths.map(|seq_len| Batch::random(CONFIG.vocab_size, 1, seq_len, seq_len as u64));
    let problem = problem();
    let run = |layout: Layout, order: [usize; 2]| {
        let config: Config = problem.json_config(layout, 2).unwrap();
        let reports = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let dp_rank = groups.dp.rank();
            let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
            let mine = if layout.dp == 2 { vec![order[dp_rank]] } else { order.to_vec() };
            for row in mine {
                micro_step(&mut engine, &global_batch(&rows[row])?.micro_batch(0..1, 1, 0)?)?;
            }
            let report = engine.step()?.unwrap();
            engine.check_replicas()?;
            Ok((report.loss, report.grad_norm, report.label_tokens))
        });
        reports.unwrap()
    };
    let accumulated = Layout { accumulation: 2, ..layout(1, 1, 0) };
    let expected = run(accumulated, [0, 1])[0];
    assert_eq!(expected.2, 16 + 22);
    let others = [run(accumulated, [1, 0]), run(layout(2, 1, 0), [0, 1]), run(layout(2, 1, 3), [1, 0])];
    for (loss, norm, tokens) in others.concat() {
        assert!((loss / expected.0 - 1.0).abs() < 1e-6 && (norm / expected.1 - 1.0).abs() < 1e-6);
        assert_eq!(tokens, expected.2);
    }
}

#[test]
fn after_a_failed_backward_nothing_trains_on_half_a_gradient() {
    let model = |config: &ModelConfig| {
        let (mut model, failed) = (llama(config), AtomicBool::new(false));
        let fails_once = move |pass: Pass| match pass {
            Pass::Backward if !failed.swap(true, Ordering::Relaxed) => {
                Err(candle_core::Error::Msg("once".into()))
            }
            _ => Ok(()),
        };
        let first = model.layers.remove(0);
        model.layers.insert(0, Hooked::wrap(first, fails_once));
        model
    };
    for stage in 0..=3 {
        on_ranks(&Problem { model, ..problem() }, layout(1, 1, stage), |engine, batches| {
            assert!(micro_step(engine, &batches[0]).unwrap_err().to_string().contains("once"));
            assert!(matches!(engine.forward(&batches[0]).err(), Some(EngineError::Broken)));
            assert!(matches!(engine.step(), Err(EngineError::Broken)));
            Ok(())
        });
    }
}

#[test]
fn a_loss_does_not_outlive_the_parameters_that_made_it() {
    on_ranks(&problem(), layout(1, 1, 0), |engine, batches| {
        let (first, second) = (engine.forward(&batches[0])?, engine.forward(&batches[0])?);
        engine.backward(first)?;
        engine.step()?;
        let error = engine.backward(second).unwrap_err();
        assert!(matches!(error, EngineError::StaleLoss { made: 0, now: 1 }), "{error}");
        // The engine itself still works.
        micro_step(engine, &batches[0])?;
        assert_eq!(engine.step()?.unwrap().step, 2);
        Ok(())
    });
}

#[test]
fn looking_at_a_batch_without_stepping_leaves_nothing_behind() {
    let global = global_batch(&packed_batch()).unwrap();
    on_ranks(&problem(), layout(2, 2, 3), |engine, _| {
        let losses = [engine.run_global_batch(&global, 0)?.loss, engine.run_global_batch(&global, 0)?.loss];
        assert_eq!(losses[0], losses[1]);
        Ok(())
    });
}

#[test]
fn times_are_those_of_the_device_and_collectives_are_within_their_phase() {
    for layout in [layout(1, 1, 0), layout(1, 2, 0)] {
        on_ranks(&problem(), layout, |engine, batches| {
            let mut steps = Vec::new();
            for _ in 0..5 {
                let mut rest = batches.iter().cloned();
                engine.train_batch(|| Ok::<_, DataError>(rest.next().unwrap()))?;
                steps.push(engine.take_times()?);
            }
            for StepTimes { forward, backward, update } in &steps {
                let within = |part: f64, whole: &PhaseTimes| {
                    // A GPU's times are rounded.
                    assert!(0.0 <= part && part <= 1.001 * whole.seconds, "{layout:?}: {part} of {whole:?}");
                };
                assert!(forward.seconds > 0.0 && backward.seconds > 0.0, "{steps:?}");
                for phase in [forward, backward, update] {
                    within(phase.comm.total(), phase);
                }
                for phase in [forward, backward] {
                    assert_eq!(phase.comm.all_to_all > 0.0, layout.sp > 1, "{layout:?}: {phase:?}");
                }
            }
            // The host of a GPU has soon launched a backward pass, and waits for it in the update.
            let is_longer = |times: &StepTimes| times.backward.seconds > times.update.seconds;
            assert!(steps.iter().any(is_longer), "{layout:?}: {steps:?}");
            assert_eq!(engine.take_times()?, StepTimes::default(), "taken");
            Ok(())
        });
    }
}

#[test]
fn two_parameters_of_one_name_are_refused() {
    let spec = ParameterSpec::new("block.weight", [CONFIG.hidden_size], Init::Ones);
    let block = |p: &[Tensor], x: &Tensor, _: &BlockContext<'_>| x.broadcast_mul(&p[0]);
    let config = problem().json_config(layout(1, 1, 0), ROWS).unwrap();
    on_mesh(&config, &LaunchOptions::default(), |_, groups| {
        let mut model = llama(&llama_config(&CONFIG));
        for _ in 0..2 {
            model.layers.push(Box::new(AutogradLayer::new("block", vec![spec.clone()], block)));
        }
        let weights = RandomWeights { seed: 0 };
        let engine = Engine::with_attention(
            model,
            &weights,
            &config,
            groups,
            Arc::new(FlashAttention::default()),
            &test_device(),
        );
        let error = engine.err().unwrap().to_string();
        assert!(error.contains("two parameters are named block.weight"), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn evaluation_is_the_loss_over_the_whole_mesh_for_any_number_of_sequences() {
    let expected = problem().reference().unwrap().steps[0].loss;
    let global = global_batch(&packed_batch()).unwrap();
    for layout in [layout(1, 1, 0), layout(2, 3, 3), layout(4, 1, 2)] {
        // Twice as many sequences as a training micro batch has with accumulation 2.
        let accumulated = Layout { accumulation: 2, ..layout };
        on_ranks(&problem(), accumulated, |engine, _| {
            let rows = ROWS / layout.dp;
            let (dp, sp) = (engine.dp_group().rank(), engine.sp_group().clone());
            let batch = global.micro_batch(dp * rows..(dp + 1) * rows, sp.world_size(), sp.rank())?;
            let sum = engine.evaluate(&batch)?;
            let loss = sum.sum / sum.valid_tokens as f64;
            assert!((loss / expected - 1.0).abs() < 1e-6, "{layout:?}: {loss} for {expected}");
            assert!(engine.forward(&batch).err().unwrap().to_string().contains("micro_batch_size"));
            Ok(())
        });
    }
}

#[test]
fn document_boundaries_must_end_with_the_sequence() {
    on_ranks(&problem(), layout(1, 1, 0), |engine, batches| {
        let mut batch = batches[0].clone();
        let mut boundaries = batch.cu_seqlens.to_vec();
        boundaries.iter_mut().for_each(|row| *row.last_mut().unwrap() += 12);
        batch.cu_seqlens = Arc::new(boundaries);
        assert!(engine.forward(&batch).err().unwrap().to_string().contains("last document boundary"));
        Ok(())
    });
}

#[test]
fn replicas_that_drift_apart_along_dp_are_detected() {
    let problem = problem();
    let global = global_batch(&problem.batch).unwrap();
    // At stage 0 each dp rank updates its own copy of everything: without the sum over dp, the copies follow
    // different gradients.
    let config = problem.json_config(layout(2, 1, 0), ROWS).unwrap();
    let check = |fault: Option<Fault>| {
        let run = |_: usize, groups: TrainingGroups| {
            let groups = match fault {
                Some(fault) => TrainingGroups { dp: FaultyGroup::wrap(groups.dp, fault), ..groups },
                None => groups,
            };
            let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
            for batch in micro_batches(&global, &engine)? {
                micro_step(&mut engine, &batch)?;
            }
            engine.step()?;
            Ok(engine.check_replicas().err())
        };
        on_mesh(&config, &LaunchOptions::default(), run).unwrap()
    };
    assert!(check(None).iter().all(Option::is_none));
    for error in check(Some(Fault::SkipsTheSum)) {
        let Some(EngineError::ReplicasDiffer { what: "parameters", axis: "dp", rank: 1, first: 0 }) = error
        else {
            panic!("{error:?}")
        };
    }
}

#[test]
fn optimizer_state_that_drifts_apart_is_detected_before_parameters_differ() {
    let problem = main_problem(Rule::AdamW(ADAMW), None);
    for (layout, expected_axis) in [(layout(1, 2, 2), "sp"), (layout(2, 1, 0), "dp")] {
        let global = global_batch(&problem.batch).unwrap();
        let config = problem.json_config(layout, ROWS).unwrap();
        let run = |rank: usize, groups| {
            let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
            for batch in micro_batches(&global, &engine)? {
                micro_step(&mut engine, &batch)?;
            }
            engine.step()?;
            engine.check_replicas()?;
            if rank == 1 {
                let kind = engine.zero().state_kinds().iter().position(|kind| *kind == "exp_avg_sq").unwrap();
                let own = engine.zero().state_partition(1, kind)?.unwrap();
                ulysses::kernels::elementwise::scale(&own.narrow(0, 3, 1)?, 1.0 + f32::EPSILON)?;
            }
            Ok(engine.check_replicas().err())
        };
        for error in on_mesh(&config, &LaunchOptions::default(), run).unwrap() {
            let Some(EngineError::ReplicasDiffer { what: "optimizer state", axis, rank: 1, first: 0 }) =
                error
            else {
                panic!("{error:?}")
            };
            assert_eq!(axis, expected_axis);
        }
    }
}
