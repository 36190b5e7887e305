//! Progress lines on standard error.

use super::step_line::{MAX_COLUMNS, step_label, step_line};
use super::{EvalMetrics, Metrics, escaped};
use std::io::Write;
use std::ops::Range;

/// Prints a line every few steps.
#[derive(Debug)]
pub struct Progress {
    /// Steps done before, and steps when the run is done.
    steps: Range<u64>,
    steps_per_print: u64,
    columns: fn() -> usize,
}

impl Progress {
    /// Of a run that has done `steps.start` steps before and ends with step `steps.end`.
    pub fn new(steps: Range<u64>, steps_per_print: u64) -> Self {
        Self { steps, steps_per_print: steps_per_print.max(1), columns: || MAX_COLUMNS }
    }

    /// Lines of at most so many columns, which may change as the run goes on; [`MAX_COLUMNS`] without it.
    #[must_use]
    pub fn in_columns(self, columns: fn() -> usize) -> Self {
        Self { columns, ..self }
    }

    /// Whether the turn of a step has come: the first, every `steps_per_print`-th, and the last.
    pub fn is_due(&self, step: u64) -> bool {
        step == self.steps.start + 1 || step == self.steps.end || step.is_multiple_of(self.steps_per_print)
    }

    /// Prints a step if its turn has come or it was skipped.
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
            "{label}  held out: loss {eval_loss:.4}, perplexity {eval_perplexity:.3} ({eval_tokens} tokens)"
        ));
    }

    /// Prints anything else that belongs to the steps.
    pub fn print(&self, text: &str) {
        // The run goes on when nobody reads its progress any more.
        let _ = writeln!(std::io::stderr(), "{}", escaped(text));
    }
}
