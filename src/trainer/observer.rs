//! [`Observer`]: hooks of a training run.

use crate::checkpoint::SavedCheckpoint;
use crate::engine::Engine;
use crate::monitor::{EvalMetrics, Metrics, Progress, RunTotals};
use std::error::Error;

/// The error of an observer, which ends the run.
pub type ObserverError = Box<dyn Error + Send + Sync>;

/// A completed step.
#[derive(Debug, Clone)]
pub struct StepEnd {
    /// The metrics of the step. Later observers see the changes of earlier ones.
    pub metrics: Metrics,
    /// Tokens per sequence.
    pub seq_len: usize,
}

/// Hooks of a training run on one rank. They run on the rank's thread, in the order in which observers were added
/// ([`Trainer::observe`](super::Trainer::observe)).
///
/// Steps and evaluations have the same metrics on all ranks, except for times and memory. An observer that communicates
/// must be added on every rank.
///
/// # Examples
///
/// ```
/// use ulysses::engine::Engine;
/// use ulysses::trainer::{Observer, ObserverError, StepEnd};
///
/// /// Ends the run when the loss explodes.
/// struct LossLimit(f64);
///
/// impl Observer for LossLimit {
///     fn on_step_end(&mut self, _: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
///         match step.metrics.loss > self.0 {
///             true => Err(format!("step {}: loss {}", step.metrics.step, step.metrics.loss).into()),
///             false => Ok(()),
///         }
///     }
/// }
/// ```
pub trait Observer {
    /// Called before a step with sequences of `seq_len` tokens.
    ///
    /// # Errors
    /// An error ends the run, as in all hooks.
    fn on_step_begin(&mut self, _engine: &mut Engine, _seq_len: usize) -> Result<(), ObserverError> {
        Ok(())
    }

    /// Called after a step, before its evaluation and its checkpoint.
    fn on_step_end(&mut self, _engine: &mut Engine, _step: &mut StepEnd) -> Result<(), ObserverError> {
        Ok(())
    }

    /// Called after an evaluation of the held-out data.
    fn on_evaluate(&mut self, _metrics: &EvalMetrics) -> Result<(), ObserverError> {
        Ok(())
    }

    /// Called after a checkpoint has been published.
    fn on_save(&mut self, _saved: &SavedCheckpoint) -> Result<(), ObserverError> {
        Ok(())
    }

    /// Called after the evaluation and the checkpoint of a step, if they were due. `is_saving` is whether a checkpoint is
    /// still being written in the background.
    fn after_step(&mut self, _is_saving: bool) -> Result<(), ObserverError> {
        Ok(())
    }

    /// Called after the last step.
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
