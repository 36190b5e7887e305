//! Decisions after an evaluation: the best checkpoint, and early stopping.

use crate::cli::Failure;
use anyhow::anyhow;
use ulysses::checkpoint::{Evaluated, Evaluations};
use ulysses::comm::{CommError, ProcessGroup, ProcessGroupExt, ReduceOp};
use ulysses::config::Config;

/// The same on all ranks: all judge the same losses.
pub(super) struct EvaluationTracker {
    pub(super) state: Evaluations,
    patience: Option<u64>,
    threshold: f64,
    keeps_best: bool,
    /// The best checkpoint before the one that is being saved.
    best_before: Option<Evaluated>,
}

/// Refuses a config that asks for the best checkpoint by an evaluation that there is not.
pub(super) fn check(config: &Config) -> Result<(), Failure> {
    let keeps_best = config.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.keep_best);
    if keeps_best && config.validation.is_none() {
        return Err(Failure::Usage(anyhow!(
            "`checkpoint.keep_best` needs the section `ulysses.validation`: the best checkpoint is the one with the lowest \
             evaluation loss"
        )));
    }
    Ok(())
}

impl EvaluationTracker {
    pub(super) fn new(config: &Config) -> Self {
        let validation = config.validation.as_ref();
        Self {
            state: Evaluations::default(),
            patience: validation.and_then(|validation| validation.early_stopping_patience),
            threshold: validation.map_or(0.0, |validation| validation.early_stopping_threshold),
            keeps_best: config.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.keep_best),
            best_before: None,
        }
    }

    /// Goes on with what a checkpoint recorded. The best checkpoint counts only where it can still be found.
    pub(super) fn restore(&mut self, state: Evaluations, has_best: bool) {
        self.state = state;
        if !(has_best && self.keeps_best) {
            self.state.best_checkpoint = None;
        }
    }

    /// The loss after a step. The model that training begins with is nobody's best checkpoint.
    pub(super) fn record(&mut self, evaluated: Evaluated) {
        self.state.add(evaluated, self.threshold);
        if self.keeps_best && evaluated.step > 0 && self.state.is_best_checkpoint(evaluated) {
            self.best_before = self.state.best_checkpoint.replace(evaluated);
        }
    }

    /// Whether a step is to be saved because it is the best so far.
    pub(super) fn is_best_checkpoint(&self, step: u64) -> bool {
        self.state.best_checkpoint.is_some_and(|best| best.step == step)
    }

    /// Takes back that a step is the best checkpoint.
    pub(super) fn not_saved(&mut self, step: u64) {
        if self.is_best_checkpoint(step) {
            self.state.best_checkpoint = self.best_before.take();
        }
    }

    /// Whether the run ends early.
    pub(super) fn stops_early(&self) -> bool {
        self.patience.is_some_and(|patience| self.state.without_improvement >= patience)
    }

    /// Why it does.
    pub(super) fn reason(&self) -> String {
        let best = self.state.best.map_or_else(String::new, |Evaluated { step, loss }| {
            format!(": the lowest is {loss:.4}, at step {step}")
        });
        format!(
            "the last {} evaluation(s) did not improve the loss by more than {}{best} \
             (`ulysses.validation.early_stopping_patience`)",
            self.state.without_improvement, self.threshold
        )
    }
}

/// The first rank's loss, on all ranks: what they decide by it must not differ in a bit. Collective.
pub(super) fn agreed(group: &dyn ProcessGroup, loss: f64) -> Result<f64, CommError> {
    let bits = if group.rank() == 0 { loss.to_bits().cast_signed() } else { i64::MIN };
    Ok(f64::from_bits(group.all_reduce_values(&[bits], ReduceOp::Max)?[0].cast_unsigned()))
}
