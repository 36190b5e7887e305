//! Progress lines on standard error.

use super::{EvalMetrics, Metrics};
use std::io::Write;
use std::ops::Range;
use std::time::Instant;

/// Prints a line every few steps, with the time that is left.
#[derive(Debug)]
pub struct Progress {
    /// Steps done before, and steps when the run is done.
    steps: Range<u64>,
    steps_per_print: u64,
    start: Instant,
}

impl Progress {
    /// Starts the clock of a run that has done `steps.start` steps before and ends with step
    /// `steps.end`.
    pub fn new(steps: Range<u64>, steps_per_print: u64) -> Self {
        Self { steps, steps_per_print: steps_per_print.max(1), start: Instant::now() }
    }

    /// Prints the step if its turn has come: the first, every `steps_per_print`-th, the last,
    /// and any that was skipped.
    pub fn report(&self, metrics: &Metrics) {
        let due = metrics.step == self.steps.start + 1
            || metrics.step == self.steps.end
            || metrics.step.is_multiple_of(self.steps_per_print);
        if due || metrics.skipped {
            // The run goes on when nobody reads its progress any more.
            let _ = writeln!(std::io::stderr(), "{}", self.line(metrics, self.start.elapsed().as_secs_f64()));
        }
    }

    /// Prints an evaluation.
    pub fn report_evaluation(&self, metrics: &EvalMetrics) {
        let EvalMetrics { step, eval_loss, eval_perplexity, eval_tokens, .. } = metrics;
        let end = self.steps.end;
        let _ = writeln!(
            std::io::stderr(),
            "step {step:>5}/{end}  held out: loss {eval_loss:.4}, perplexity {eval_perplexity:.3} ({eval_tokens} tokens)"
        );
    }

    fn line(&self, metrics: &Metrics, elapsed_seconds: f64) -> String {
        let Metrics { step, loss, lr, grad_norm, tokens_per_second, .. } = metrics;
        if metrics.skipped {
            let why = match metrics.overflow {
                true => format!("the gradient overflowed, with a loss scale of {}", metrics.loss_scale),
                false => "no token of the batch has a label".to_owned(),
            };
            return format!("step {step:>5}/{}  skipped: {why}", self.steps.end);
        }
        let Range { start, end } = self.steps;
        let left = elapsed_seconds / step.saturating_sub(start) as f64 * end.saturating_sub(*step) as f64;
        format!(
            "step {step:>5}/{end}  loss {loss:<7.4} lr {lr:<9.2e} grad norm {grad_norm:<8.3} \
             {tokens_per_second:>8.0} tokens/s  {left:>4.0} s left"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(step: u64, skipped: bool) -> Metrics {
        Metrics {
            step,
            loss: 2.5,
            lr: 1e-3,
            grad_norm: 0.5,
            tokens: 8192,
            tokens_per_second: 4096.0,
            step_seconds: 2.0,
            data_seconds: 0.0,
            slowest_rank: 0,
            slowest_rank_ratio: 1.0,
            padding_share: 0.0,
            loss_scale: 1.0,
            skipped,
            overflow: false,
            comm_bytes: 0,
            memory_bytes: 0,
        }
    }

    #[test]
    fn a_line_extrapolates_the_time_that_is_left() {
        let line = Progress::new(0..20, 1).line(&metrics(5, false), 10.0);
        assert!(line.contains("step     5/20") && line.contains("30 s left"), "{line}");
    }

    #[test]
    fn steps_before_a_resumption_took_none_of_the_time() {
        let line = Progress::new(10..20, 1).line(&metrics(15, false), 10.0);
        assert!(line.contains("step    15/20") && line.contains("10 s left"), "{line}");
    }

    #[test]
    fn skipped_steps_say_why() {
        let line = Progress::new(0..20, 1).line(&metrics(5, true), 10.0);
        assert!(line.contains("skipped: no token"), "{line}");
        let overflow = Metrics { overflow: true, loss_scale: 512.0, ..metrics(5, true) };
        let line = Progress::new(0..20, 1).line(&overflow, 10.0);
        assert!(line.contains("skipped: the gradient overflowed, with a loss scale of 512"), "{line}");
    }
}
