//! [`Observer`]: hooks of a training run.

use crate::checkpoint::SavedCheckpoint;
use crate::engine::{Engine, StepTimes};
use crate::monitor::{EvalMetrics, Metrics, Progress, RunTotals};
use std::error::Error;

/// Whatever an observer fails with. It ends the run.
pub type ObserverError = Box<dyn Error + Send + Sync>;

/// A step that has just ended.
#[derive(Debug, Clone)]
pub struct StepEnd {
    /// Metrics of the step. What an observer adds, those after it see.
    pub metrics: Metrics,
    /// Time of each phase and each part of the model, on this rank.
    pub times: StepTimes,
    /// Tokens of a sequence.
    pub seq_len: usize,
}

/// Follows a run on one rank. Hooks run on the rank's thread, in the order in which observers were added
/// ([`Trainer::observe`](super::Trainer::observe)).
///
/// Steps and evaluations have the same metrics on all ranks, but for times and memory. An observer that communicates is
/// added on every rank.
pub trait Observer {
    /// Before a step of sequences of `seq_len` tokens.
    ///
    /// # Errors
    /// Any ends the run, as in all hooks.
    fn on_step_begin(&mut self, _engine: &mut Engine, _seq_len: usize) -> Result<(), ObserverError> {
        Ok(())
    }

    /// After a step, before its evaluation and its checkpoint.
    fn on_step_end(&mut self, _engine: &mut Engine, _step: &mut StepEnd) -> Result<(), ObserverError> {
        Ok(())
    }

    /// After an evaluation of the held-out data.
    fn on_evaluate(&mut self, _metrics: &EvalMetrics) -> Result<(), ObserverError> {
        Ok(())
    }

    /// After a checkpoint was published.
    fn on_save(&mut self, _saved: &SavedCheckpoint) -> Result<(), ObserverError> {
        Ok(())
    }

    /// After the evaluation and the checkpoint of a step, if they were due. `is_saving`: a checkpoint is still being
    /// written in the background.
    fn after_step(&mut self, _is_saving: bool) -> Result<(), ObserverError> {
        Ok(())
    }

    /// After the last step.
    fn on_train_end(&mut self) -> Result<(), ObserverError> {
        Ok(())
    }
}

impl<T: Observer + ?Sized> Observer for &mut T {
    fn on_step_begin(&mut self, engine: &mut Engine, seq_len: usize) -> Result<(), ObserverError> {
        (**self).on_step_begin(engine, seq_len)
    }

    fn on_step_end(&mut self, engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        (**self).on_step_end(engine, step)
    }

    fn on_evaluate(&mut self, metrics: &EvalMetrics) -> Result<(), ObserverError> {
        (**self).on_evaluate(metrics)
    }

    fn on_save(&mut self, saved: &SavedCheckpoint) -> Result<(), ObserverError> {
        (**self).on_save(saved)
    }

    fn after_step(&mut self, is_saving: bool) -> Result<(), ObserverError> {
        (**self).after_step(is_saving)
    }

    fn on_train_end(&mut self) -> Result<(), ObserverError> {
        (**self).on_train_end()
    }
}

impl Observer for RunTotals {
    fn on_step_end(&mut self, _engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        self.record(&step.metrics);
        Ok(())
    }
}

impl Observer for Progress {
    fn on_step_end(&mut self, _engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        self.report(&step.metrics);
        Ok(())
    }

    fn on_evaluate(&mut self, metrics: &EvalMetrics) -> Result<(), ObserverError> {
        self.report_evaluation(metrics);
        Ok(())
    }
}
