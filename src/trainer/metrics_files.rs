//! `metrics.jsonl`, and the event files beside it.

use super::error::TrainerError;
use super::event_files::{EventFiles, cannot};
use super::observer::{Observer, ObserverError, StepEnd};
use crate::config::{Config, OnSaveError};
use crate::engine::Engine;
use crate::monitor::{EvalMetrics, MetricsWriter, is_out_of_space};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Writes the metrics of steps and evaluations to `metrics.jsonl`, and to the files that the config's `tensorboard` and
/// `csv_monitor` ask for. An observer of one rank.
///
/// Lines that find no room on the disk wait in memory where a checkpoint that is being written takes the room, and gives
/// it back when it fails, or where `checkpoint.on_error` asks to train on. Otherwise they end the run.
#[derive(Debug)]
pub struct MetricsFiles {
    path: PathBuf,
    writer: MetricsWriter,
    events: EventFiles,
    /// Whether the run goes on without room.
    goes_on: bool,
    /// Why lines wait in memory.
    waiting: Option<TrainerError>,
    log: fn(&str),
}

impl MetricsFiles {
    /// Goes on with the files in `output` after `first_step` steps, or begins them. `log` takes a line when there is no
    /// room on the disk, and when there is again.
    ///
    /// # Errors
    /// Files that cannot be written.
    pub fn open(
        config: &Config,
        output: &Path,
        first_step: u64,
        log: fn(&str),
    ) -> Result<Self, TrainerError> {
        let path = output.join("metrics.jsonl");
        let writer = MetricsWriter::resume(&path, first_step).map_err(cannot(path.display().to_string()))?;
        let checkpoint = config.checkpoint.as_ref();
        let goes_on = checkpoint.is_some_and(|checkpoint| checkpoint.on_error == OnSaveError::Continue);
        let events = EventFiles::new(config, output)?;
        Ok(Self { path, writer, events, goes_on, waiting: None, log })
    }

    fn write(
        &mut self,
        metrics: &impl Serialize,
        events: Result<(), TrainerError>,
    ) -> Result<(), TrainerError> {
        let written = self.writer.write(metrics).map_err(self.cannot_write());
        self.wait_for_room(events.and(written))
    }

    fn cannot_write(&self) -> impl FnOnce(std::io::Error) -> TrainerError + use<> {
        cannot(format!("cannot write {}", self.path.display()))
    }

    /// Lets what finds no room wait, and says so once.
    fn wait_for_room(&mut self, written: Result<(), TrainerError>) -> Result<(), TrainerError> {
        match written {
            Ok(()) if self.waiting.take().is_some() => {
                (self.log)("there is room again: the metrics are complete");
            }
            Ok(()) => {}
            Err(TrainerError::Io { what, source }) if is_out_of_space(&source) => {
                let error = TrainerError::Io { what, source };
                if self.waiting.is_none() {
                    (self.log)(&format!("{error}; the metrics wait in memory until there is room"));
                }
                self.waiting = Some(error);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Writes the lines that found no room before, or fails.
    fn complete(&mut self) -> Result<(), TrainerError> {
        if self.waiting.is_some() {
            let events = self.events.flush();
            let written = self.writer.flush().map_err(self.cannot_write());
            self.wait_for_room(events.and(written))?;
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
        if is_saving || self.goes_on { Ok(()) } else { Ok(self.complete()?) }
    }

    fn on_train_end(&mut self) -> Result<(), ObserverError> {
        Ok(self.complete()?)
    }
}
