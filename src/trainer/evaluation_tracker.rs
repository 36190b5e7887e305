//! Decisions after an evaluation: the best checkpoint, and early stopping.

use crate::checkpoint::{EvaluationResult, EvaluationSummary};
use crate::config::Config;
use crate::monitor::counted;

/// Tracks the losses of evaluations. Equal on all ranks, because all have the same losses.
pub(super) struct EvaluationTracker {
    pub(super) state: EvaluationSummary,
    patience: Option<u64>,
    threshold: f64,
    keeps_best: bool,
    /// The best checkpoint on disk.
    saved_best: Option<EvaluationResult>,
    /// Better checkpoints, in order of improvement, whose saves have not ended.
    unsaved: Vec<EvaluationResult>,
}

impl EvaluationTracker {
    /// Creates a tracker for held-out data with the hash `data_hash`.
    pub(super) fn new(config: &Config, data_hash: u64) -> Self {
        let validation = config.ulysses.validation.as_ref();
        Self {
            state: EvaluationSummary { data_hash: Some(data_hash), ..EvaluationSummary::default() },
            patience: validation.and_then(|validation| validation.early_stopping_patience),
            threshold: validation.map_or(0.0, |validation| validation.early_stopping_threshold),
            keeps_best: config.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.keep_best),
            saved_best: None,
            unsaved: Vec::new(),
        }
    }

    /// Restores the state of a checkpoint, if its held-out data is the same. The best checkpoint is restored only if it
    /// still exists.
    pub(super) fn restore(&mut self, state: EvaluationSummary, has_best: bool) {
        let data_hash = self.state.data_hash;
        if state.data_hash.is_some() && state.data_hash != data_hash {
            return;
        }
        let best_checkpoint = state.best_checkpoint.filter(|_| has_best && self.keeps_best);
        self.state = EvaluationSummary { best_checkpoint, data_hash, ..state };
        self.saved_best = best_checkpoint;
    }

    /// Restarts the patience counter, for different training data.
    pub(super) fn restart_patience(&mut self) {
        self.state.without_improvement = 0;
    }

    /// Records the loss after a step. The initial model is never the best checkpoint.
    pub(super) fn record(&mut self, evaluated: EvaluationResult) {
        self.state.add(evaluated, self.threshold);
        if self.keeps_best && evaluated.step > 0 && self.state.is_best_checkpoint(evaluated) {
            self.state.best_checkpoint = Some(evaluated);
            self.unsaved.push(evaluated);
        }
    }

    /// Returns whether a step must be saved because it is the best so far.
    pub(super) fn is_best_checkpoint(&self, step: u64) -> bool {
        self.state.best_checkpoint.is_some_and(|best| best.step == step)
    }

    /// Records that the checkpoint of a step is on disk.
    pub(super) fn saved(&mut self, step: u64) {
        if let Some(at) = self.unsaved.iter().position(|best| best.step == step) {
            self.saved_best = self.unsaved.drain(..=at).next_back();
        }
    }

    /// Records that the save of a step failed. The best checkpoint is then one that is, or may still be, saved.
    pub(super) fn not_saved(&mut self, step: u64) {
        if let Some(at) = self.unsaved.iter().position(|best| best.step == step) {
            self.unsaved.remove(at);
            self.state.best_checkpoint = self.unsaved.last().copied().or(self.saved_best);
        }
    }

    /// Returns whether the run stops early.
    pub(super) fn stops_early(&self) -> bool {
        self.patience.is_some_and(|patience| self.state.without_improvement >= patience)
    }

    /// Returns the reason for stopping early.
    pub(super) fn reason(&self) -> String {
        let best = self.state.best.map_or_else(String::new, |EvaluationResult { step, loss }| {
            format!(": the lowest is {loss:.4}, at step {step}")
        });
        format!(
            "the last {} did not improve the loss by more than {}{best} \
             (`ulysses.validation.early_stopping_patience`)",
            counted(self.state.without_improvement as usize, "evaluation"),
            self.threshold
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracker() -> EvaluationTracker {
        let text = r#"{"train_batch_size": 1, "checkpoint": {"keep_best": true}, "ulysses": {"validation": {"data": "v"}}}"#;
        EvaluationTracker::new(&Config::from_json_str(text, "c.json").unwrap(), 7)
    }

    fn record(tracker: &mut EvaluationTracker, evaluations: &[(u64, f64)]) {
        evaluations.iter().for_each(|&(step, loss)| tracker.record(EvaluationResult { step, loss }));
    }

    fn best(tracker: &EvaluationTracker) -> Option<u64> {
        tracker.state.best_checkpoint.map(|best| best.step)
    }

    #[test]
    fn the_best_checkpoint_is_one_that_was_saved_however_many_saves_fail() {
        let mut tracker = tracker();
        record(&mut tracker, &[(5, 3.0)]);
        tracker.saved(5);
        record(&mut tracker, &[(10, 2.0), (20, 1.0)]);
        tracker.not_saved(10);
        assert_eq!(best(&tracker), Some(20), "its save is in progress");
        tracker.not_saved(20);
        assert_eq!(best(&tracker), Some(5));
        record(&mut tracker, &[(30, 2.5)]);
        assert_eq!(best(&tracker), Some(30), "better than what is on the disk");
        tracker.saved(30);
        tracker.not_saved(40);
        assert_eq!(best(&tracker), Some(30));
    }

    #[test]
    fn losses_on_other_held_out_data_do_not_count() {
        let mut before = tracker();
        record(&mut before, &[(5, 1.0), (10, 2.0)]);
        let mut same = tracker();
        same.restore(before.state, true);
        assert_eq!((best(&same), same.state.without_improvement), (Some(5), 1));
        same.restart_patience();
        assert_eq!((best(&same), same.state.without_improvement), (Some(5), 0));
        let mut other = tracker();
        other.restore(EvaluationSummary { data_hash: Some(8), ..before.state }, true);
        assert_eq!((best(&other), other.state.without_improvement), (None, 0));
        let mut unknown = tracker();
        unknown.restore(EvaluationSummary { data_hash: None, ..before.state }, false);
        assert_eq!((best(&unknown), unknown.state.best.unwrap().step), (None, 5));
    }
}
