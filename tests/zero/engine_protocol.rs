//! forward, backward and step: the order in which they may be called, and the errors otherwise.

use crate::support::mesh_run::{Layout, Rule, global_batch, layout, micro_batches, on_mesh};
use crate::support::problems::{main_problem, packed_batch};
use anyhow::Result;
use std::sync::Arc;
use ulysses::comm::thread::LaunchOptions;
use ulysses::data::{DataError, MicroBatch};
use ulysses::engine::{Engine, EngineError, StepReport};
use ulysses::kernels::attention::FlashAttention;
use ulysses::zero::{Buffer, Division};

const ROWS: usize = 8;

/// Runs `work` on every rank of two meshes, with the rank's micro batches of one step.
fn on_meshes<T: Send>(
    accumulation: usize,
    work: impl Fn(&mut Engine, &[MicroBatch]) -> Result<T> + Sync,
) -> Vec<T> {
    let problem = main_problem(Rule::Sgd { lr: 0.1 }, None);
    let global = global_batch(&problem.batch).unwrap();
    let run = |layout: Layout| {
        let config = problem.json_config(Layout { accumulation, ..layout }, ROWS).unwrap();
        let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
            let batches = micro_batches(&global, &engine)?;
            work(&mut engine, &batches)
        });
        ranks.unwrap()
    };
    [layout(1, 1, 0), layout(2, 2, 3)].into_iter().flat_map(run).collect()
}

fn micro_step(engine: &mut Engine, batch: &MicroBatch) -> Result<()> {
    let loss = engine.forward(batch)?;
    Ok(engine.backward(loss)?)
}

/// The report of an undisturbed step, without values that are not computed.
fn report(engine: &mut Engine) -> StepReport {
    StepReport { comm_bytes: 0, ..engine.step().unwrap().unwrap() }
}

fn undisturbed(accumulation: usize) -> Vec<StepReport> {
    on_meshes(accumulation, |engine, batches| {
        for batch in batches {
            micro_step(engine, batch)?;
        }
        Ok(report(engine))
    })
}

#[test]
fn one_backward_too_many_is_an_error_and_leaves_the_step_as_it_was() {
    let disturbed = on_meshes(2, |engine, batches| {
        micro_step(engine, &batches[0])?;
        micro_step(engine, &batches[1])?;
        let error = micro_step(engine, &batches[0]).unwrap_err();
        let kind = error.downcast_ref();
        assert!(matches!(kind, Some(EngineError::StepDue { accumulation: 2 })), "{error}");
        Ok(report(engine))
    });
    assert_eq!(disturbed, undisturbed(2));
}

#[test]
fn loss_and_gradients_exist_at_the_accumulation_boundary_only() {
    on_meshes(2, |engine, batches| {
        let refused = |engine: &Engine, expected: usize| {
            let errors = [engine.gather_gradients().err(), engine.global_loss().err()];
            for error in errors.map(Option::unwrap) {
                let EngineError::NotAtBoundary { accumulation: 2, done } = error else { panic!("{error}") };
                assert_eq!(done, expected);
            }
        };
        refused(engine, 0);
        micro_step(engine, &batches[0])?;
        refused(engine, 1);
        micro_step(engine, &batches[1])?;
        assert!(engine.global_loss()? > 0.0 && !engine.gather_gradients()?.is_empty());
        engine.step()?;
        refused(engine, 0);
        Ok(())
    });
}

#[test]
fn step_before_the_boundary_returns_none_and_changes_nothing() {
    let reports = on_meshes(2, |engine, batches| {
        assert!(engine.step()?.is_none());
        let before = engine.zero().hash(Buffer::Parameters, Division::default())?;
        micro_step(engine, &batches[0])?;
        assert!(engine.step()?.is_none());
        assert_eq!(
            (engine.zero().hash(Buffer::Parameters, Division::default())?, engine.global_step()),
            (before, 0)
        );
        micro_step(engine, &batches[1])?;
        let report = report(engine);
        assert_ne!(engine.zero().hash(Buffer::Parameters, Division::default())?, before);
        assert_eq!(engine.global_step(), 1);
        Ok(report)
    });
    assert_eq!(reports, undisturbed(2));
}

#[test]
fn train_batch_completes_a_step_that_was_begun() {
    let reports = on_meshes(2, |engine, batches| {
        micro_step(engine, &batches[0])?;
        let mut rest = batches[1..].iter().cloned();
        let report = engine.train_batch(|| Ok::<_, DataError>(rest.next().unwrap()))?;
        Ok(StepReport { comm_bytes: 0, ..report })
    });
    assert_eq!(reports, undisturbed(2));
}

/// A micro batch with one defect, and the name of the defect in the error.
type Defect = (&'static str, fn(&mut MicroBatch));

const DEFECTS: [Defect; 6] = [
    ("number of sequences", |batch| batch.batch_size += 1),
    ("number of its local tokens", |batch| batch.input_ids.truncate(1)),
    ("number of its local labels", |batch| batch.labels.push(0)),
    ("number of its local position ids", |batch| batch.position_ids.truncate(1)),
    ("number of sequences in its cu_seqlens", |batch| Arc::make_mut(&mut batch.cu_seqlens).push(vec![0, 22])),
    ("has the tokens 1..12 of each sequence", |batch| batch.shard = (1..12).into()),
];

#[test]
fn a_micro_batch_that_does_not_fit_is_named_and_the_engine_stays_usable() {
    let reports = on_meshes(1, |engine, batches| {
        for (what, spoil) in DEFECTS {
            let mut batch = batches[0].clone();
            spoil(&mut batch);
            let error = engine.forward(&batch).err().unwrap().to_string();
            assert!(error.contains(what), "{what}: {error}");
            let own_shard = format!("expected {}, this rank's shard", batches[0].shard);
            assert!(batch.shard == batches[0].shard || error.ends_with(&own_shard), "{error}");
        }
        micro_step(engine, &batches[0])?;
        Ok(report(engine))
    });
    assert_eq!(reports, undisturbed(1));
}

#[test]
fn a_shard_of_a_longer_sequence_is_refused_without_sequence_parallelism_too() {
    // Attention over part of a sequence would be attention over another sequence.
    let problem = main_problem(Rule::Sgd { lr: 0.1 }, None);
    let global = global_batch(&problem.batch).unwrap();
    let config = problem.json_config(layout(1, 1, 0), ROWS).unwrap();
    let errors = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
        let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
        Ok(engine.forward(&global.micro_batch(0..ROWS, 2, 0)?).err().unwrap().to_string())
    });
    let error = &errors.unwrap()[0];
    assert!(error.contains("has the tokens 0..11 of each sequence, expected 0..22"), "{error}");
}

#[test]
fn a_global_batch_of_another_size_is_an_error_that_names_both_sizes() {
    let short = global_batch(&packed_batch().rows(0..4)).unwrap();
    on_meshes(1, |engine, _| {
        let error = engine.run_global_batch(&short, 1).unwrap_err();
        assert!(matches!(error, EngineError::MicroBatch { got: 4, expected: ROWS, .. }), "{error}");
        Ok(())
    });
}

#[test]
fn a_config_for_another_mesh_is_refused() {
    let problem = main_problem(Rule::Sgd { lr: 0.1 }, None);
    let config = |dp, sp| problem.json_config(layout(dp, sp, 0), ROWS).unwrap();
    let (mesh, other) = (config(1, 2), config(2, 1));
    let errors = on_mesh(&mesh, &LaunchOptions::default(), |_, groups| {
        Ok(problem.engine(&other, groups, Arc::new(FlashAttention::default())).err().unwrap().to_string())
    });
    for error in errors.unwrap() {
        assert!(error.contains("the config asks for dp = 2, the mesh has dp = 1"), "{error}");
    }
}
