//! The options and the result of a run.

use super::data_stream::check_limit;
use super::error::TrainerError;
use super::resume::Resume;
use crate::checkpoint::EvaluationSummary;
use crate::config::Config;
use crate::model::HfSource;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Options of a run that are not in the config.
#[derive(Debug, Clone)]
pub struct TrainerOptions {
    /// The directory of the checkpoints; by default the config's `output`.
    pub output: Option<PathBuf>,
    /// The checkpoint to resume from.
    pub resume: Option<Resume>,
    /// This node's directory in host memory for `checkpoint.memory_interval`. It must outlive the process, as that of
    /// `ulysses launch` does, and exist on every rank's node; otherwise no copies are made.
    pub memory_dir: Option<PathBuf>,
    /// If the data differs from the checkpoint's, starts at its beginning instead of failing.
    pub reset_data: bool,
    /// The model as in Hugging Face's `config.json`, required for exports; null for other models.
    pub model: Value,
    /// The files to copy into exports, if the run started from a model directory.
    pub source: Option<HfSource>,
    /// Request to save and stop after the step, set by a signal handler, for example.
    pub stop: Arc<AtomicBool>,
    /// Receives log lines on the first rank. By default they are `tracing` events.
    pub log: fn(&str),
}

impl Default for TrainerOptions {
    fn default() -> Self {
        Self {
            output: None,
            resume: None,
            memory_dir: None,
            reset_data: false,
            model: Value::Null,
            source: None,
            stop: Arc::default(),
            log: log_event,
        }
    }
}

/// The default log: a line is a `tracing` event, and a warning if it begins with `warning: `.
pub(super) fn log_event(line: &str) {
    match line.strip_prefix("warning: ") {
        Some(warning) => tracing::warn!("{warning}"),
        None => tracing::info!("{line}"),
    }
}

/// The result of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainReport {
    /// Completed steps, including those before a resume.
    pub steps: u64,
    /// The number of the last step according to the config.
    pub last_step: u64,
    /// Whether [`TrainerOptions::stop`] ended the run.
    pub stopped: bool,
    /// The reason, if early stopping ended the run.
    pub stopped_early: Option<String>,
    /// The newest checkpoint that the run has saved.
    pub checkpoint: Option<PathBuf>,
    /// All evaluations.
    pub evaluations: EvaluationSummary,
}

/// Checks that a config sets the end of the run, and evaluations if it keeps the best checkpoint.
///
/// # Errors
/// When a setting is missing.
pub fn check_config(config: &Config) -> Result<(), TrainerError> {
    check_limit(config)?;
    let keeps_best = config.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.keep_best);
    if keeps_best && config.ulysses.validation.is_none() {
        return Err(TrainerError::KeepBestWithoutValidation);
    }
    Ok(())
}
