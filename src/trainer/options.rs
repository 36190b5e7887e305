//! What a run is told besides its config, and what it reports.

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

/// What the config does not state about a run.
#[derive(Debug, Clone)]
pub struct TrainerOptions {
    /// Directory of the checkpoints; the config's `output` where there is none.
    pub output: Option<PathBuf>,
    /// Where the run goes on from.
    pub resume: Option<Resume>,
    /// Begins data that is not the checkpoint's from its beginning, instead of refusing it.
    pub reset_data: bool,
    /// The model in the vocabulary of Hugging Face's `config.json`, which exports need; null for models that have no
    /// such description.
    pub model: Value,
    /// The files that an export keeps, if the run started from a model directory.
    pub source: Option<HfSource>,
    /// Set by a signal handler of the program's, for one: all ranks end after the step, and save.
    pub stop: Arc<AtomicBool>,
    /// Takes lines about the run, on the first rank. By default they are `tracing` events.
    pub log: fn(&str),
}

impl Default for TrainerOptions {
    fn default() -> Self {
        Self {
            output: None,
            resume: None,
            reset_data: false,
            model: Value::Null,
            source: None,
            stop: Arc::default(),
            log: |line| tracing::info!("{line}"),
        }
    }
}

/// The end of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainReport {
    /// Steps that were done, with those before a resumption.
    pub steps: u64,
    /// The number of the last step that there was to do.
    pub last_step: u64,
    /// Whether [`TrainerOptions::stop`] ended it.
    pub stopped: bool,
    /// Why early stopping ended it, if it did.
    pub stopped_early: Option<String>,
    /// The newest checkpoint that it has saved.
    pub checkpoint: Option<PathBuf>,
    /// All evaluations.
    pub evaluations: EvaluationSummary,
}

/// Refuses a config that does not state when the run ends, or asks for the best checkpoint by an evaluation that there
/// is not.
///
/// # Errors
/// What is missing.
pub fn check_config(config: &Config) -> Result<(), TrainerError> {
    check_limit(config)?;
    let keeps_best = config.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.keep_best);
    if keeps_best && config.ulysses.validation.is_none() {
        return Err(TrainerError::KeepBestWithoutValidation);
    }
    Ok(())
}
