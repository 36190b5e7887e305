//! Progress lines on standard error.

use super::step_line::{MAX_COLUMNS, step_label, step_line};
use super::{EvalMetrics, Metrics, write_line};
use std::ops::Range;

/// Prints a line every few steps.
#[derive(Debug)]
pub struct Progress {
    /// Steps completed at the start, and at the end of the run.
    steps: Range<u64>,
    steps_per_print: u64,
    columns: fn() -> usize,
}

impl Progress {
    /// Creates the progress of a run that has completed `steps.start` steps and ends with step `steps.end`.
    pub fn new(steps: Range<u64>, steps_per_print: u64) -> Self {
        Self { steps, steps_per_print: steps_per_print.max(1), columns: || MAX_COLUMNS }
    }

    /// Sets the maximum number of columns, which may change during the run; by default [`MAX_COLUMNS`].
    #[must_use]
    pub fn in_columns(self, columns: fn() -> usize) -> Self {
        Self { columns, ..self }
    }

    /// Returns whether a step is printed: the first, every `steps_per_print`-th, and the last.
    pub fn is_due(&self, step: u64) -> bool {
        step == self.steps.start + 1 || step == self.steps.end || step.is_multiple_of(self.steps_per_print)
    }

    /// Prints a step if it is due or was skipped.
    pub fn report(&self, metrics: &Metrics) {
        if self.is_due(metrics.step) || metrics.skipped {
            self.print(&step_line(metrics, self.steps.end, (self.columns)()));
        }
    }

    /// Prints an evaluation.
    pub fn report_evaluation(&self, metrics: &EvalMetrics) {
        let EvalMetrics { step, eval_loss, eval_perplexity, eval_tokens, .. } = metrics;
        let label = step_label(*step, self.steps.end);
        self.print(&format!(
            "{label}  evaluation: loss {eval_loss:.4}, perplexity {eval_perplexity:.3} ({eval_tokens} tokens)"
        ));
    }

    /// Prints another line between the steps.
    pub fn print(&self, text: &str) {
        // A closed standard error must not end the run.
        let _ = write_line(&mut std::io::stderr(), text);
    }
}
