//! Runs of a small model on a 1 × 2 mesh.

use super::*;
use crate::checkpoint::SavedCheckpoint;
use crate::comm::{LaunchError, LaunchOptions, MeshGroups, launch};
use crate::config::Config;
use crate::data::{Corpus, PackedSequences};
use crate::engine::{Engine, initialize};
use crate::mesh::DeviceMesh;
use crate::model::{Model, RandomWeights, preset};
use crate::monitor::EvalMetrics;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Logs the calls of an observer.
#[derive(Default)]
struct EventLog(Vec<String>);

impl Observer for EventLog {
    fn on_step_end(&mut self, _engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        self.0.push(format!("step {} loss {:x}", step.metrics.step, step.metrics.loss.to_bits()));
        Ok(())
    }

    fn on_evaluate(&mut self, metrics: &EvalMetrics) -> Result<(), ObserverError> {
        self.0.push(format!("evaluation {} loss {:x}", metrics.step, metrics.eval_loss.to_bits()));
        Ok(())
    }

    fn on_save(&mut self, saved: &SavedCheckpoint) -> Result<(), ObserverError> {
        self.0.push(format!("save {}", saved.step));
        Ok(())
    }

    fn on_train_end(&mut self) -> Result<(), ObserverError> {
        self.0.push("end".to_owned());
        Ok(())
    }
}

fn sequences(text: &str) -> Arc<PackedSequences> {
    let document = text.repeat(40).bytes().map(u32::from).collect();
    Arc::new(PackedSequences::new(Corpus::from_documents([document]).unwrap(), 32).unwrap())
}

fn config(steps: u64, changes: Value) -> Config {
    let mut json = json!({
        "train_batch_size": 2, "mesh_param": [1, 2],
        "optimizer": { "type": "AdamW", "params": { "lr": 1e-3 } }, "checkpoint": { "interval": 2 },
        "ulysses": { "steps": steps, "validation": { "fraction": 0.1, "eval_interval": 2 } },
    });
    for (key, value) in changes.as_object().unwrap() {
        json[key] = value.clone();
    }
    Config::from_json_str(&json.to_string(), "test").unwrap()
}

/// Returns the events of the first rank's observer, and the result of the run.
fn run(
    config: &Config,
    has_held_out: bool,
    options: &TrainerOptions,
) -> Result<(Vec<String>, TrainReport), LaunchError> {
    let mesh = DeviceMesh::dp_sp(1, 2).unwrap();
    let held_out = has_held_out.then(|| sequences("a lazy dog sleeps. ").into());
    let data = TrainingData::new(sequences("the quick brown fox jumps. "), held_out).unwrap();
    let mut ranks = launch(2, &LaunchOptions::default(), |rank| {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let model = Model::new(&preset("nano")?)?;
        let engine = initialize(model, &RandomWeights { seed: 1 }, config, &groups)?;
        let mut events = EventLog::default();
        let mut trainer = Trainer::new(engine, &groups, data.clone(), options.clone())?;
        trainer.observe(&mut events);
        let report = trainer.train()?;
        drop(trainer);
        Ok::<_, ObserverError>((events.0, report))
    })?;
    Ok(ranks.swap_remove(0))
}

fn in_dir(dir: &Path, resume: Option<Resume>) -> TrainerOptions {
    TrainerOptions { output: Some(dir.to_owned()), resume, ..TrainerOptions::default() }
}

#[test]
fn observers_see_every_step_and_a_resumed_run_equals_the_rest_of_an_uninterrupted_one() {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (events, report) = run(&config(4, json!({})), true, &in_dir(whole.path(), None)).unwrap();
    let what: Vec<_> = events.iter().map(|line| line.split(" loss").next().unwrap()).collect();
    let expected =
        ["step 1", "step 2", "evaluation 2", "save 2", "step 3", "step 4", "evaluation 4", "save 4", "end"];
    assert_eq!(what, expected);
    assert_eq!((report.steps, report.stopped, report.stopped_early), (4, false, None));
    assert_eq!(report.checkpoint, Some(whole.path().join("step_00000004")));

    run(&config(2, json!({})), true, &in_dir(parts.path(), Some(Resume::Newest(None)))).unwrap();
    let resumed = in_dir(parts.path(), Some(Resume::new(Some(parts.path().to_owned())).unwrap()));
    let (rest, _) = run(&config(4, json!({})), true, &resumed).unwrap();
    assert_eq!(rest, events[4..]);
}

#[test]
fn a_run_that_is_asked_to_stop_saves_and_ends_after_the_step() {
    let dir = tempfile::tempdir().unwrap();
    let stop = Arc::new(AtomicBool::new(true));
    let options = TrainerOptions { stop, ..in_dir(dir.path(), None) };
    let (_, report) = run(&config(4, json!({})), true, &options).unwrap();
    assert_eq!((report.steps, report.last_step, report.stopped), (1, 4, true));
    assert!(dir.path().join("step_00000001").is_dir());
}

#[test]
fn missing_settings_are_reported_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let error = |config: &Config, has_held_out, options: &TrainerOptions| {
        let error = run(config, has_held_out, options).unwrap_err();
        std::error::Error::source(&error).unwrap().to_string()
    };
    let new = in_dir(dir.path(), None);
    assert!(error(&config(2, json!({})), false, &new).contains("no held-out data"));
    assert!(error(&config(2, json!({})), true, &TrainerOptions::default()).contains("set `ulysses.output`"));
    let keep_best = json!({ "checkpoint": { "keep_best": true }, "ulysses": { "steps": 2 } });
    assert!(error(&config(2, keep_best), true, &new).contains("`checkpoint.keep_best` requires"));
    let longer = json!({ "ulysses": { "steps": 9, "seq_len": 32, "seq_len_schedule": [[4, 64]] } });
    assert!(error(&config(2, longer), true, &new).contains("has 1 phase(s)"));
    run(&config(2, json!({})), true, &new).unwrap();
    assert!(error(&config(4, json!({})), true, &new).contains("contains checkpoints of an earlier run"));
    let (other, older) = (tempfile::tempdir().unwrap(), Some(Resume::From(dir.path().join("step_00000002"))));
    run(&config(4, json!({})), true, &in_dir(other.path(), None)).unwrap();
    let into_other = error(&config(6, json!({})), true, &in_dir(other.path(), older));
    assert!(into_other.contains("up to step_00000004"), "{into_other}");
    assert!(matches!(Resume::new(Some("no such".into())), Err(TrainerError::NothingToResume { .. })));
}
