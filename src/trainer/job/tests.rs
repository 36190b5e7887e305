//! A job as a program runs it.

use super::{Job, JobError, JobOptions};
use crate::checkpoint::OutputLock;
use crate::config::Overrides;
use crate::engine::Engine;
use crate::trainer::{Observer, ObserverError, StepEnd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Writes a text and a config that trains on it.
fn config_in(dir: &Path, steps: u64) -> PathBuf {
    let data = dir.join("data.txt");
    std::fs::write(&data, "the quick brown fox jumps over the lazy dog. ".repeat(40)).unwrap();
    let config = serde_json::json!({
        "train_batch_size": 2,
        "mesh_param": [2, 1],
        "ulysses": {
            "model": "nano", "data": data, "seq_len": 64, "steps": steps, "threads_per_rank": 1,
            "validation": { "fraction": 0.2, "eval_interval": 2 },
        },
    });
    let file = dir.join("config.json");
    std::fs::write(&file, config.to_string()).unwrap();
    file
}

fn error_of(file: &Path) -> JobError {
    Job::from_config(file).and_then(Job::train).expect_err("the job must fail")
}

/// Records the loss of each step.
struct Losses(Arc<Mutex<Vec<f64>>>);

impl Observer for Losses {
    fn on_step_end(&mut self, _engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        self.0.lock().unwrap().push(step.metrics.loss);
        Ok(())
    }
}

#[test]
fn a_config_file_trains_with_observers_on_the_ranks_that_want_them() {
    let dir = tempfile::tempdir().unwrap();
    let mut job = Job::from_config(config_in(dir.path(), 4)).unwrap();
    let losses = Arc::new(Mutex::new(Vec::new()));
    let of_first = losses.clone();
    job.observe(move |trainer| Ok((trainer.group().rank() == 0).then(|| Losses(of_first.clone()))));
    let report = job.train().unwrap();
    let losses = losses.lock().unwrap();
    assert_eq!((report.train.steps, report.summary.ranks.len(), losses.len()), (4, 2, 4));
    assert!(losses[3] < losses[0], "{losses:?}");
    assert_eq!(report.summary.totals.last_loss, Some((4, losses[3])));
    assert!(report.train.evaluations.best.is_some(), "it evaluates the held-out data");
}

#[test]
fn a_job_locks_its_output_directory_and_writes_event_files_there() {
    let dir = tempfile::tempdir().unwrap();
    let (file, output) = (config_in(dir.path(), 2), dir.path().join("out"));
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config["ulysses"]["output"] = serde_json::json!(output);
    config["csv_monitor"] = serde_json::json!({ "enabled": true, "job_name": "csv" });
    std::fs::write(&file, config.to_string()).unwrap();
    std::fs::create_dir(&output).unwrap();
    let held = OutputLock::acquire(&output, "job 17").unwrap();
    let in_use = error_of(&file).to_string();
    assert!(in_use.ends_with("out is in use by job 17"), "{in_use}");
    assert!(!output.join("csv").exists(), "a rejected job leaves nothing behind");
    drop(held);
    let report = Job::from_config(&file).unwrap().train().unwrap();
    assert_eq!(report.output, Some(output.clone()));
    let losses = std::fs::read_to_string(output.join("csv/Train_Samples_train_loss.csv")).unwrap();
    assert_eq!(losses.lines().count(), 3, "a title and two steps: {losses}");
}

#[test]
fn flags_override_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let overrides = Overrides { mesh: Some((1, 2)), steps: Some(1), ..Overrides::default() };
    let job = Job::new(&config_in(dir.path(), 4), JobOptions::default(), overrides).unwrap();
    assert_eq!(job.prepared().config.mesh.sp_size, 2);
    assert_eq!(job.train().unwrap().train.steps, 1);
}

#[test]
fn a_mistake_in_the_settings_is_told_from_unusable_data() {
    let dir = tempfile::tempdir().unwrap();
    let file = config_in(dir.path(), 1);
    std::fs::write(dir.path().join("data.txt"), "a").unwrap();
    let unusable = error_of(&file);
    assert!(!unusable.is_usage(), "{unusable}");
    assert!(unusable.to_string().contains("data.txt"), "{unusable}");
    let missing = error_of(&dir.path().join("no-such.json"));
    assert!(missing.is_usage() && missing.to_string().contains("no-such.json"), "{missing}");
    let text = std::fs::read_to_string(&file).unwrap().replace("nano", "no-such-model");
    std::fs::write(&file, text).unwrap();
    let unknown = error_of(&file);
    assert!(unknown.is_usage() && unknown.to_string().contains("`no-such-model`"), "{unknown}");
}
