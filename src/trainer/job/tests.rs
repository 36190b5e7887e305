//! A job as a program runs it.

use super::{Job, JobError, JobLog, JobOptions, JobRanks};
use crate::checkpoint::OutputLock;
use crate::comm::{LaunchError, LaunchOptions, ProcessGroupExt, RankContext, RankMain, Session, launch};
use crate::config::{MeshShape, Overrides};
use crate::engine::Engine;
use crate::trainer::{Observer, ObserverError, StepEnd};
use candle_core::Device;
use std::cell::Cell;
use std::error::Error;
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
    Job::from_config(file).and_then(|mut job| job.train()).expect_err("the job must fail")
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
    job.observe(move |_, trainer| {
        if trainer.group().rank() == 0 {
            trainer.observe(Losses(of_first.clone()));
        }
        Ok(())
    });
    let report = job.train().unwrap();
    let losses = losses.lock().unwrap();
    assert_eq!((report.train.steps, report.summary.ranks.len(), losses.len()), (4, 2, 4));
    assert!(!report.was_complete, "it had steps to train");
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
    let overrides = Overrides { mesh: Some(MeshShape::dp_sp(1, 2)), steps: Some(1), ..Overrides::default() };
    let options = JobOptions { overrides, ..JobOptions::default() };
    let mut job = Job::new(&config_in(dir.path(), 4), options).unwrap();
    assert_eq!(job.prepared().config.mesh.sp_size, 2);
    assert_eq!(job.train().unwrap().train.steps, 1);
    let again = job.train().expect_err("a second call").to_string();
    assert!(again.starts_with("a job trains once"), "{again}");
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

/// A rank that is a thread, as the session of a process.
struct ThreadSession(RankContext);

impl Session for ThreadSession {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn world_size(&self) -> usize {
        self.0.world_size
    }

    fn local_size(&self) -> usize {
        self.0.world_size
    }

    fn uses_mpi(&self) -> bool {
        true
    }

    fn run_rank(&mut self, _options: &LaunchOptions, run: RankMain<'_>) -> Result<(), LaunchError> {
        let rank = self.0.rank;
        run(&self.0, Device::Cpu).map_err(|source| LaunchError::Failed { rank, source })
    }

    fn all_gather_bytes(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>> {
        Ok(self.0.group.all_gather_varied(own)?)
    }
}

thread_local! {
    static IS_MUTED: Cell<Option<bool>> = const { Cell::new(None) };
}

#[test]
fn all_processes_fail_with_the_first_failed_one_which_reports() {
    let outcomes = launch(3, &LaunchOptions::default(), |rank| {
        let own = match rank.rank {
            0 => Ok("prepared"),
            1 => Err(JobError::usage("an unknown model")),
            _ => Err(JobError::run("no space")),
        };
        let mut ranks = JobRanks::default();
        ranks.log = JobLog { mute: |is_muted| IS_MUTED.set(Some(is_muted)), ..JobLog::default() };
        ranks.session = Some(Box::new(ThreadSession(rank)));
        assert!(ranks.agree(Ok("all")).is_ok() && IS_MUTED.get().is_none());
        let error = ranks.agree(own).expect_err("rank 1 fails");
        Ok::<_, JobError>((IS_MUTED.get(), error.is_usage(), error.to_string()))
    });
    let expected = [
        (Some(true), true, "rank 1 cannot start".to_owned()),
        (Some(false), true, "an unknown model".to_owned()),
        (Some(true), false, "no space".to_owned()),
    ];
    assert_eq!(outcomes.unwrap(), expected);
}
