//! TensorBoard's files and CSV, where the config asks for them.

use super::made::MadeDirectories;
use crate::{Failure, OrFail};
use anyhow::Context;
use serde_json::Value;
use std::path::{Path, PathBuf};
use ulysses::config::{Config, EventFilesConfig, MonitoringConfig};
use ulysses::monitor::{CsvFiles, EvalMetrics, EventFile, Metrics};

/// Rank 0's.
pub(super) struct Monitors {
    event_file: Option<EventFile>,
    csv: Option<CsvFiles>,
    /// Rows of a step: what DeepSpeed counts by.
    rows_per_step: u64,
}

const EVENT_FILE: &str = "cannot write TensorBoard's event file";

/// A metric's name, the step or sample that it belongs to, and its value.
type Event = (String, u64, f64);

/// Makes the directories that the config names and sees that they can be written to, before there is anything to write.
pub(super) fn check(
    monitoring: &MonitoringConfig,
    output: &Path,
    made: &mut MadeDirectories,
) -> Result<(), Failure> {
    let sections = [("tensorboard", &monitoring.tensorboard), ("csv_monitor", &monitoring.csv_monitor)];
    for (section, files) in sections {
        let Some(dir) = dir(files, output) else { continue };
        let key = if files.output_path.is_empty() { "job_name" } else { "output_path" };
        let attempt = made.make(&dir).and_then(|()| tempfile::tempfile_in(&dir));
        attempt
            .with_context(|| format!("`{section}.{key}`: cannot write to {}", dir.display()))
            .or_usage()?;
    }
    Ok(())
}

/// Where a monitor's files go. `output` is for what has no path of its own.
fn dir(files: &EventFilesConfig, output: &Path) -> Option<PathBuf> {
    let parent = match files.output_path.as_str() {
        "" => output,
        path => Path::new(path),
    };
    files.enabled.then(|| parent.join(&files.job_name))
}

impl Monitors {
    /// Begins the files; `output` is for what has no path of its own.
    pub(super) fn new(config: &Config, output: &Path) -> anyhow::Result<Self> {
        let monitoring = &config.monitoring;
        let event_file = dir(&monitoring.tensorboard, output).map(|dir| {
            EventFile::create(&dir)
                .with_context(|| format!("`tensorboard`: cannot write to {}", dir.display()))
        });
        let csv = dir(&monitoring.csv_monitor, output).map(|dir| {
            CsvFiles::create(&dir)
                .with_context(|| format!("`csv_monitor`: cannot write to {}", dir.display()))
        });
        let rows_per_step = config.train_batch_size as u64;
        Ok(Self { event_file: event_file.transpose()?, csv: csv.transpose()?, rows_per_step })
    }

    /// A step: its loss, rate and scale under DeepSpeed's names, which count samples, and every metric by step.
    pub(super) fn record(&mut self, metrics: &Metrics) -> anyhow::Result<()> {
        let samples = metrics.step * self.rows_per_step;
        let deepspeeds = [
            ("train_loss", Some(metrics.loss).filter(|_| !metrics.skipped)),
            ("lr", Some(metrics.lr)),
            ("loss_scale", Some(metrics.loss_scale)),
        ];
        let by_sample = deepspeeds
            .into_iter()
            .filter_map(|(name, value)| Some((format!("Train/Samples/{name}"), samples, value?)));
        let mut by_step = by_step("Train/Steps", metrics.step, serde_json::to_value(metrics)?);
        // A skipped step has no loss: the 0 in its place is none.
        by_step.retain(|(name, ..)| !metrics.skipped || !name.ends_with("/loss"));
        self.write(by_sample.chain(by_step))
    }

    /// An evaluation, by step.
    pub(super) fn record_evaluation(&mut self, metrics: &EvalMetrics) -> anyhow::Result<()> {
        let events = by_step("Eval/Steps", metrics.step, serde_json::to_value(metrics)?);
        self.write(events.into_iter())
    }

    /// Every event to every file, whatever becomes of the others; the first failure.
    fn write(&mut self, events: impl Iterator<Item = Event>) -> anyhow::Result<()> {
        let mut written = Ok(());
        for (tag, step, value) in events {
            if let Some(file) = &mut self.event_file {
                written = written.and(file.add_scalar(&tag, step, value).context(EVENT_FILE));
            }
            if let Some(files) = &mut self.csv {
                let added = files.add(&tag, step, value);
                written = written.and(added.with_context(|| format!("cannot write the CSV file of {tag}")));
            }
        }
        written
    }

    /// Writes what found no room.
    pub(super) fn flush(&mut self) -> anyhow::Result<()> {
        let events = self.event_file.as_mut().map_or(Ok(()), EventFile::flush).context(EVENT_FILE);
        events.and(self.csv.as_mut().map_or(Ok(()), CsvFiles::flush).context("cannot write the CSV files"))
    }
}

/// The numbers of a record but its step.
fn by_step(prefix: &str, step: u64, record: Value) -> Vec<Event> {
    let Value::Object(fields) = record else { return Vec::new() };
    let numbers = fields.into_iter().filter_map(|(name, value)| Some((name, value.as_f64()?)));
    let events = numbers
        .filter(|(name, _)| name != "step")
        .map(|(name, value)| (format!("{prefix}/{name}"), step, value));
    events.collect()
}
