//! `metrics.jsonl` and event files.

use super::error::TrainerError;
use super::event_files::{EventFiles, cannot};
use super::observer::{Observer, ObserverError, StepEnd};
use crate::config::{Config, OnSaveError};
use crate::engine::Engine;
use crate::monitor::{EvalMetrics, MetricsWriter, RestartMetrics, is_out_of_space};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Writes the metrics of steps and evaluations to `metrics.jsonl`, and to the files that the config's `tensorboard` and
/// `csv_monitor` enable. An observer for one rank.
///
/// When the disk is full, lines wait in memory while a checkpoint is being written (a failed save frees its space), or if
/// `checkpoint.on_error` is "continue". Otherwise the run ends.
#[derive(Debug)]
pub struct MetricsFiles {
    path: PathBuf,
    writer: MetricsWriter,
    events: EventFiles,
    /// Whether the run continues when the disk is full.
    continues: bool,
    /// The error because of which lines wait in memory.
    waiting: Option<TrainerError>,
    log: fn(&str),
}

impl MetricsFiles {
    /// Resumes the files in `output` after `first_step` steps, or creates them. `log` receives a line when the disk is
    /// full, and when there is space again.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn open(
        config: &Config,
        output: &Path,
        first_step: u64,
        log: fn(&str),
    ) -> Result<Self, TrainerError> {
        let path = output.join("metrics.jsonl");
        let writer = MetricsWriter::resume(&path, first_step).map_err(cannot(path.display().to_string()))?;
        let checkpoint = config.checkpoint.as_ref();
        let continues = checkpoint.is_some_and(|checkpoint| checkpoint.on_error == OnSaveError::Continue);
        let events = EventFiles::new(config, output)?;
        Ok(Self { path, writer, events, continues, waiting: None, log })
    }

    /// Records that the run goes on after a restart.
    ///
    /// # Errors
    /// When the line cannot be written.
    pub fn record_restart(&mut self, restart: &RestartMetrics) -> Result<(), TrainerError> {
        self.write(restart, Ok(()))
    }

    fn write(
        &mut self,
        metrics: &impl Serialize,
        events: Result<(), TrainerError>,
    ) -> Result<(), TrainerError> {
        let written = self.writer.write(metrics).map_err(self.cannot_write());
        self.wait_for_space(events.and(written))
    }

    fn cannot_write(&self) -> impl FnOnce(std::io::Error) -> TrainerError + use<> {
        cannot(format!("cannot write {}", self.path.display()))
    }

    /// Keeps lines in memory when the disk is full, and logs that once.
    fn wait_for_space(&mut self, written: Result<(), TrainerError>) -> Result<(), TrainerError> {
        match written {
            Ok(()) if self.waiting.take().is_some() => {
                (self.log)("disk space is available again: all metrics are written");
            }
            Ok(()) => {}
            Err(TrainerError::Io { what, source }) if is_out_of_space(&source) => {
                let error = TrainerError::Io { what, source };
                if self.waiting.is_none() {
                    (self.log)(&format!("{error}; metrics are kept in memory until disk space is available"));
                }
                self.waiting = Some(error);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Writes the lines that wait in memory, or fails.
    fn complete(&mut self) -> Result<(), TrainerError> {
        if self.waiting.is_some() {
            let events = self.events.flush();
            let written = self.writer.flush().map_err(self.cannot_write());
            self.wait_for_space(events.and(written))?;
        }
        self.waiting.take().map_or(Ok(()), Err)
    }
}

impl Observer for MetricsFiles {
    fn on_step_end(&mut self, _engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        let events = self.events.record(&step.metrics);
        Ok(self.write(&step.metrics, events)?)
    }

    fn on_evaluate(&mut self, metrics: &EvalMetrics) -> Result<(), ObserverError> {
        let events = self.events.record_evaluation(metrics);
        Ok(self.write(metrics, events)?)
    }

    fn after_step(&mut self, is_saving: bool) -> Result<(), ObserverError> {
        if is_saving || self.continues { Ok(()) } else { Ok(self.complete()?) }
    }

    fn on_train_end(&mut self) -> Result<(), ObserverError> {
        Ok(self.complete()?)
    }
}
