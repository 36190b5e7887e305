//! Progress on standard error: a live line on a terminal, plain lines elsewhere.

use super::step_line::{columns, cut, live_line, place, step_line};
use super::{EvalMetrics, Metrics, escaped};
use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use std::io::Write;
use std::ops::Range;
use std::time::Instant;

/// What is drawn at the bottom of the terminal, if anything is.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Lets `write` write to the terminal above the live line, which would garble it otherwise.
pub fn above_progress<T>(write: impl FnOnce() -> T) -> T {
    let shown = SHOWN.lock().clone();
    match shown {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Prints a line every few steps, with the time that is left. On a terminal the last step is shown besides,
/// from step to step.
#[derive(Debug)]
pub struct Progress {
    /// Steps done before, and steps when the run is done.
    steps: Range<u64>,
    steps_per_print: u64,
    start: Instant,
    /// Hidden where standard error is not a terminal.
    bar: ProgressBar,
}

impl Progress {
    /// Starts the clock of a run that has done `steps.start` steps before and ends with step
    /// `steps.end`.
    pub fn new(steps: Range<u64>, steps_per_print: u64) -> Self {
        let bar = ProgressBar::new(steps.end.saturating_sub(steps.start));
        if let Ok(style) = ProgressStyle::with_template("{wide_bar} {prefix}\n{msg}") {
            bar.set_style(style.progress_chars("━╸ "));
        }
        if !bar.is_hidden() {
            *SHOWN.lock() = Some(bar.clone());
        }
        Self { steps, steps_per_print: steps_per_print.max(1), start: Instant::now(), bar }
    }

    /// Whether the turn of a step has come: the first, every `steps_per_print`-th, and the last.
    pub fn is_due(&self, step: u64) -> bool {
        step == self.steps.start + 1 || step == self.steps.end || step.is_multiple_of(self.steps_per_print)
    }

    /// Shows a step, and prints it if its turn has come or it was skipped.
    pub fn report(&self, metrics: &Metrics) {
        let Range { start, end } = self.steps;
        if self.is_due(metrics.step) || metrics.skipped {
            self.print(&step_line(metrics, end, columns()));
        }
        if !self.bar.is_hidden() {
            let left = self.seconds_left(metrics.step, self.start.elapsed().as_secs_f64());
            self.bar.set_position(metrics.step.saturating_sub(start));
            self.bar.set_prefix(format!("step {}/{end}, {} left", metrics.step, duration(left)));
            let shares = cut(&times(metrics), columns());
            self.bar.set_message(format!("{}\n{shares}", live_line(metrics, columns())));
        }
    }

    /// Prints an evaluation.
    pub fn report_evaluation(&self, metrics: &EvalMetrics) {
        let EvalMetrics { step, eval_loss, eval_perplexity, eval_tokens, .. } = metrics;
        let place = place(*step, self.steps.end);
        self.print(&format!(
            "{place}  held out: loss {eval_loss:.4}, perplexity {eval_perplexity:.3} ({eval_tokens} tokens)"
        ));
    }

    /// Prints anything else that belongs to the steps.
    pub fn print(&self, text: &str) {
        // The run goes on when nobody reads its progress any more.
        let _ = above_progress(|| writeln!(std::io::stderr(), "{}", escaped(text)));
    }

    fn seconds_left(&self, step: u64, elapsed_seconds: f64) -> f64 {
        let Range { start, end } = self.steps;
        elapsed_seconds / step.saturating_sub(start) as f64 * end.saturating_sub(step) as f64
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        SHOWN.lock().take();
        self.bar.finish_and_clear();
    }
}

/// What the time of the step went into, if the engine timed it.
fn times(metrics: &Metrics) -> Vec<String> {
    let Metrics { time, step_seconds, data_seconds, .. } = metrics;
    if time.forward_seconds == 0.0 {
        return Vec::new();
    }
    let parts = [
        ("compute", time.compute_seconds),
        ("all-to-all", time.all_to_all_seconds),
        ("other comm", time.other_comm_seconds()),
        ("data", *data_seconds),
    ];
    parts.map(|(what, seconds)| format!("{what} {:.0} %", 100.0 * seconds / step_seconds)).into()
}

/// Seconds as people say them.
fn duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds:02} s"),
        (hours, minutes, _) => format!("{hours} h {minutes:02} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::TimeShares;
    use super::*;

    #[test]
    fn the_time_that_is_left_is_extrapolated_from_the_steps_of_this_run() {
        let seconds_left = |steps: Range<u64>, step| Progress::new(steps, 1).seconds_left(step, 10.0);
        assert_eq!(seconds_left(0..20, 5), 30.0);
        assert_eq!(seconds_left(10..20, 15), 10.0, "steps before a resumption took none of the time");
    }

    #[test]
    fn the_shares_of_the_time_are_shown_where_the_engine_timed_the_step() {
        let time = TimeShares {
            forward_seconds: 1.0,
            all_to_all_seconds: 0.5,
            dp_comm_seconds: 0.1,
            sp_comm_seconds: 0.1,
            compute_seconds: 1.2,
            ..TimeShares::default()
        };
        let metrics = Metrics { time, step_seconds: 2.0, data_seconds: 0.1, ..Metrics::default() };
        assert_eq!(times(&metrics).join(", "), "compute 60 %, all-to-all 25 %, other comm 10 %, data 5 %");
        assert_eq!(times(&Metrics::default()), [""; 0]);
    }

    #[test]
    fn durations_are_told_in_two_units() {
        assert_eq!([4.4, 64.0, 3700.0].map(duration), ["4 s", "1 min 04 s", "1 h 01 min"]);
    }
}
