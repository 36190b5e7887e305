//! TensorBoard and CSV files of metrics.

use super::created_dirs::CreatedDirs;
use super::error::TrainerError;
use super::observer::{Observer, ObserverError, StepEnd};
use crate::config::{Config, EventFilesConfig, MonitoringConfig};
use crate::engine::Engine;
use crate::monitor::{CsvFiles, EvalMetrics, EventFile, Metrics};
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};

/// Writes metrics to the files that the config's `tensorboard` and `csv_monitor` enable.
#[derive(Debug)]
pub(super) struct EventFiles {
    event_file: Option<EventFile>,
    csv: Option<CsvFiles>,
    /// Sequences per step: DeepSpeed counts samples.
    train_batch_size: u64,
}

const EVENT_FILE: &str = "cannot write TensorBoard's event file";

/// The name of a metric, its step or sample, and its value.
type Event = (String, u64, f64);

/// Creates the directories of `tensorboard` and `csv_monitor`, and checks in advance that they are writable. `output` is
/// the default parent directory.
///
/// # Errors
/// When a directory is not writable; the error names its key.
pub fn check_event_files(
    monitoring: &MonitoringConfig,
    output: &Path,
    created: &mut CreatedDirs,
) -> Result<(), TrainerError> {
    let sections = [("tensorboard", &monitoring.tensorboard), ("csv_monitor", &monitoring.csv_monitor)];
    for (section, files) in sections {
        let Some(dir) = dir(files, output) else { continue };
        let key = if files.output_path.is_empty() { "job_name" } else { "output_path" };
        let attempt = created.create(&dir).and_then(|()| tempfile::tempfile_in(&dir));
        attempt.map_err(cannot(format!("`{section}.{key}`: cannot write to {}", dir.display())))?;
    }
    Ok(())
}

/// Returns the directory of a monitor's files. `output` is the default parent directory.
fn dir(files: &EventFilesConfig, output: &Path) -> Option<PathBuf> {
    let parent = match files.output_path.as_str() {
        "" => output,
        path => Path::new(path),
    };
    files.enabled.then(|| parent.join(&files.job_name))
}

/// Returns the error of a failed write.
pub(super) fn cannot(what: impl Into<String>) -> impl FnOnce(io::Error) -> TrainerError {
    |source| TrainerError::Io { what: what.into(), source }
}

impl EventFiles {
    /// Creates the files; `output` is the default parent directory.
    pub(super) fn new(config: &Config, output: &Path) -> Result<Self, TrainerError> {
        let monitoring = &config.monitoring;
        let event_file = dir(&monitoring.tensorboard, output).map(|dir| {
            EventFile::create(&dir)
                .map_err(cannot(format!("`tensorboard`: cannot write to {}", dir.display())))
        });
        let csv = dir(&monitoring.csv_monitor, output).map(|dir| {
            CsvFiles::create(&dir)
                .map_err(cannot(format!("`csv_monitor`: cannot write to {}", dir.display())))
        });
        let train_batch_size = config.train_batch_size as u64;
        Ok(Self { event_file: event_file.transpose()?, csv: csv.transpose()?, train_batch_size })
    }

    /// Records a step: loss, learning rate and loss scale under DeepSpeed's names, by sample, and every metric by step.
    pub(super) fn record(&mut self, metrics: &Metrics) -> Result<(), TrainerError> {
        let samples = metrics.step * self.train_batch_size;
        let deepspeeds = [
            ("train_loss", Some(metrics.loss).filter(|_| !metrics.skipped)),
            ("lr", Some(metrics.lr)),
            ("loss_scale", Some(metrics.loss_scale)),
        ];
        let by_sample = deepspeeds
            .into_iter()
            .filter_map(|(name, value)| Some((format!("Train/Samples/{name}"), samples, value?)));
        let mut by_step = by_step("Train/Steps", metrics.step, serde_json::to_value(metrics));
        // A skipped step has no loss; the 0 is a placeholder.
        by_step.retain(|(name, ..)| !metrics.skipped || !name.ends_with("/loss"));
        self.write(by_sample.chain(by_step))
    }

    /// Records an evaluation, by step.
    pub(super) fn record_evaluation(&mut self, metrics: &EvalMetrics) -> Result<(), TrainerError> {
        let events = by_step("Eval/Steps", metrics.step, serde_json::to_value(metrics));
        self.write(events.into_iter())
    }

    /// Writes every event to every file, even after a failure; returns the first error.
    fn write(&mut self, events: impl Iterator<Item = Event>) -> Result<(), TrainerError> {
        let mut written = Ok(());
        for (tag, step, value) in events {
            if let Some(file) = &mut self.event_file {
                written = written.and(file.add_scalar(&tag, step, value).map_err(cannot(EVENT_FILE)));
            }
            if let Some(files) = &mut self.csv {
                let added = files.add(&tag, step, value);
                written = written.and(added.map_err(cannot(format!("cannot write the CSV file of {tag}"))));
            }
        }
        written
    }

    /// Writes events that waited for disk space.
    pub(super) fn flush(&mut self) -> Result<(), TrainerError> {
        let events = self.event_file.as_mut().map_or(Ok(()), EventFile::flush).map_err(cannot(EVENT_FILE));
        let csv = self.csv.as_mut().map_or(Ok(()), CsvFiles::flush);
        events.and(csv.map_err(cannot("cannot write the CSV files")))
    }
}

/// Of a job without `metrics.jsonl`; [`MetricsFiles`](super::MetricsFiles) writes both.
impl Observer for EventFiles {
    fn on_step_end(&mut self, _engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        Ok(self.record(&step.metrics)?)
    }

    fn on_evaluate(&mut self, metrics: &EvalMetrics) -> Result<(), ObserverError> {
        Ok(self.record_evaluation(metrics)?)
    }

    fn on_train_end(&mut self) -> Result<(), ObserverError> {
        Ok(self.flush()?)
    }
}

/// Returns the numbers of a record, except its step.
fn by_step(prefix: &str, step: u64, record: serde_json::Result<Value>) -> Vec<Event> {
    let Ok(Value::Object(fields)) = record else { return Vec::new() };
    let numbers = fields.into_iter().filter_map(|(name, value)| Some((name, value.as_f64()?)));
    let events = numbers
        .filter(|(name, _)| name != "step")
        .map(|(name, value)| (format!("{prefix}/{name}"), step, value));
    events.collect()
}
