//! A failure on one rank soon ends the step on all ranks, with an error that names the rank.

use crate::support::device::test_device;
use crate::support::doubles::{Hooked, Pass};
use crate::support::mesh_run::{
    Layout, ReferenceWeights, Rule, global_batch, layout, llama_config, micro_batches, on_mesh,
};
use crate::support::problems::{ADAMW, CONFIG, main_problem};
use anyhow::Result;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use ulysses::comm::ProcessGroupExt;
use ulysses::comm::thread::{LaunchError, LaunchOptions};
use ulysses::data::{DataError, MicroBatch};
use ulysses::engine::Engine;
use ulysses::kernels::attention::FlashAttention;
use ulysses::model::{Model, ModelConfig};

/// Far more than a step takes, far less than the limit of a test.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The rank that fails.
const CULPRIT: usize = 2;

const LAYOUTS: [Layout; 4] = [layout(1, 3, 0), layout(4, 1, 2), layout(2, 2, 0), layout(2, 2, 3)];

/// The result of a launch, and the error of every rank (`None` if it panicked or succeeded).
struct Outcome {
    launched: Result<Vec<()>, LaunchError>,
    errors: Vec<Option<String>>,
}

/// Runs `train` on every rank of a mesh.
fn run(
    layout: Layout,
    model: impl Fn(usize, &ModelConfig) -> Model + Sync,
    train: impl Fn(usize, &mut Engine, MicroBatch) -> Result<()> + Sync,
) -> Outcome {
    let problem = main_problem(Rule::AdamW(ADAMW), None);
    let global = global_batch(&problem.batch).unwrap();
    let config = problem.json_config(layout, 8).unwrap();
    let options = LaunchOptions { timeout: TIMEOUT, ..LaunchOptions::default() };
    let errors = Mutex::new(vec![None; layout.dp * layout.sp]);
    let started = Instant::now();
    let launched = on_mesh(&config, &options, |rank, groups| {
        let model = model(rank, &llama_config(&CONFIG));
        let weights = ReferenceWeights(&problem.weights);
        let mut engine = Engine::with_attention(
            model,
            &weights,
            &config,
            groups,
            Arc::new(FlashAttention::default()),
            &test_device(),
        )?;
        let batch = micro_batches(&global, &engine)?.remove(0);
        // A barrier, so that no rank fails while others still create their groups.
        let together = || Ok(engine.dp_group().barrier().and_then(|()| engine.sp_group().barrier())?);
        let outcome = together().and_then(|()| train(rank, &mut engine, batch));
        errors.lock().unwrap()[rank] = outcome.as_ref().err().map(ToString::to_string);
        outcome
    });
    assert!(started.elapsed() < TIMEOUT, "{layout:?}: took {:?}", started.elapsed());
    Outcome { launched, errors: errors.into_inner().unwrap() }
}

fn llama(_rank: usize, config: &ModelConfig) -> Model {
    Model::new(config).unwrap()
}

fn step(engine: &mut Engine, batch: &MicroBatch) -> Result<()> {
    engine.train_batch(|| Ok::<_, DataError>(batch.clone()))?;
    Ok(())
}

impl Outcome {
    /// Panics unless every other rank names the culprit and its reason.
    fn assert_all_name_the_culprit(&self, layout: Layout, reason: &str) {
        for (rank, error) in self.errors.iter().enumerate().filter(|(rank, _)| *rank != CULPRIT) {
            let error = error.as_deref().unwrap_or("no error");
            let names = error.contains(&format!("rank {CULPRIT}")) && error.contains(reason);
            assert!(names, "{layout:?}: rank {rank} says: {error}");
        }
    }
}

/// Modifies the culprit's micro batch of the second step.
fn check_invalid_batch(spoil: impl Fn(&mut MicroBatch) + Sync, reason: &str) {
    for layout in LAYOUTS {
        let outcome = run(layout, llama, |rank, engine, mut batch| {
            step(engine, &batch)?;
            if rank == CULPRIT {
                spoil(&mut batch);
            }
            step(engine, &batch)
        });
        outcome.assert_all_name_the_culprit(layout, reason);
        let own = outcome.errors[CULPRIT].as_deref().unwrap();
        assert!(own.contains(reason) && !own.contains("failed"), "{layout:?}: {own}");
        let launched = outcome.launched.unwrap_err();
        assert_eq!(launched.rank(), Some(CULPRIT), "{layout:?}: {launched}");
    }
}

#[test]
fn a_token_outside_the_vocabulary_on_one_rank() {
    check_invalid_batch(|batch| batch.input_ids[3] = 61, "`ids[3]` is 61, valid are 0..61");
}

#[test]
fn a_label_outside_the_vocabulary_on_one_rank() {
    check_invalid_batch(|batch| batch.labels[1] = 1000, "`labels[1]` is 1000, valid are 0..61");
}

#[test]
fn a_micro_batch_of_another_size_on_one_rank() {
    check_invalid_batch(|batch| batch.labels.truncate(1), "number of its local labels is");
}

#[test]
fn a_layer_that_panics_on_one_rank() {
    for (layout, panics_in) in LAYOUTS.into_iter().flat_map(|l| [(l, Pass::Forward), (l, Pass::Backward)]) {
        let model = |rank: usize, config: &ModelConfig| {
            let mut model = Model::new(config).unwrap();
            if rank == CULPRIT {
                // The first layer: in the backward pass, reductions and gathers are in progress.
                let panics = move |pass: Pass| {
                    assert!(pass != panics_in, "out of cheese");
                    Ok(())
                };
                let first = model.layers.remove(0);
                model.layers.insert(0, Hooked::wrap(first, panics));
            }
            model
        };
        let outcome = run(layout, model, |_, engine, batch| step(engine, &batch));
        outcome.assert_all_name_the_culprit(layout, "out of cheese");
        assert!(matches!(outcome.launched, Err(LaunchError::Panicked { rank: CULPRIT, .. })), "{layout:?}");
    }
}

#[test]
fn a_rank_that_returns_before_the_others() {
    for layout in LAYOUTS {
        let outcome = run(layout, llama, |rank, engine, batch| {
            step(engine, &batch)?;
            if rank == CULPRIT { Ok(()) } else { step(engine, &batch) }
        });
        outcome.assert_all_name_the_culprit(layout, "returned while others wait for it");
        assert!(outcome.launched.is_err(), "{layout:?}");
    }
}

#[test]
fn a_rank_that_returns_between_forward_and_backward() {
    for layout in LAYOUTS {
        let outcome = run(layout, llama, |rank, engine, batch| {
            let loss = engine.forward(&batch)?;
            if rank != CULPRIT {
                engine.backward(loss)?;
            }
            Ok(())
        });
        outcome.assert_all_name_the_culprit(layout, "returned while others wait for it");
    }
}
