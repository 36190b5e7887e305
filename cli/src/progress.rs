//! Progress on standard error: plain lines, and a live line on a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use std::ops::Range;
use std::time::Instant;
use ulysses::config::Config;
use ulysses::engine::Engine;
use ulysses::monitor::{EvalMetrics, MAX_COLUMNS, Metrics, Progress, breakdown, live_lines};
use ulysses::trainer::{Observer, ObserverError, StepEnd};

/// The progress bar at the bottom of the terminal, if any.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Runs `write` with the live line hidden, which would garble its output.
pub(crate) fn above_progress<T>(write: impl FnOnce() -> T) -> T {
    let shown = SHOWN.lock().clone();
    match shown {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Returns the width of standard error: the terminal's, or [`MAX_COLUMNS`].
fn columns() -> usize {
    let terminal = console::Term::stderr().size_checked().map(|(_, columns)| usize::from(columns));
    // Some pseudo-terminals have no size.
    terminal.filter(|columns| *columns > 0).map_or(MAX_COLUMNS, |columns| columns.min(MAX_COLUMNS))
}

/// Prints the lines of [`Progress`], and the time breakdown of a step if the config asks for it. On a terminal it also
/// shows the current step with the remaining time.
pub(crate) struct LiveProgress {
    lines: Progress,
    has_breakdown: bool,
    steps: Range<u64>,
    start: Instant,
    /// Hidden where standard error is not a terminal.
    bar: ProgressBar,
}

impl LiveProgress {
    /// Starts the clock of a run from step `steps.start` (exclusive) to `steps.end` (inclusive).
    pub(crate) fn new(steps: Range<u64>, config: &Config) -> Self {
        let bar = ProgressBar::new(steps.end.saturating_sub(steps.start));
        if let Ok(style) = ProgressStyle::with_template("{wide_bar} {prefix}\n{msg}") {
            bar.set_style(style.progress_chars("━╸ "));
        }
        if !bar.is_hidden() {
            *SHOWN.lock() = Some(bar.clone());
        }
        let lines = Progress::new(steps.clone(), config.steps_per_print).in_columns(columns);
        let has_breakdown = config.monitoring.wall_clock_breakdown;
        Self { lines, has_breakdown, steps, start: Instant::now(), bar }
    }

    fn show(&self, metrics: &Metrics) {
        let Range { start, end } = self.steps;
        let left = seconds_left(&self.steps, metrics.step, self.start.elapsed().as_secs_f64());
        self.bar.set_position(metrics.step.saturating_sub(start));
        self.bar.set_prefix(format!("step {}/{end}, {} left", metrics.step, duration(left)));
        self.bar.set_message(live_lines(metrics, columns()));
    }
}

impl Observer for LiveProgress {
    fn on_step_end(&mut self, _engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        above_progress(|| {
            self.lines.report(&step.metrics);
            if self.has_breakdown && self.lines.is_due(step.metrics.step) {
                self.lines.print(&breakdown(&step.metrics));
            }
        });
        if !self.bar.is_hidden() {
            self.show(&step.metrics);
        }
        Ok(())
    }

    fn on_evaluate(&mut self, metrics: &EvalMetrics) -> Result<(), ObserverError> {
        above_progress(|| self.lines.report_evaluation(metrics));
        Ok(())
    }
}

impl Drop for LiveProgress {
    fn drop(&mut self) {
        SHOWN.lock().take();
        self.bar.finish_and_clear();
    }
}

fn seconds_left(steps: &Range<u64>, step: u64, elapsed_seconds: f64) -> f64 {
    elapsed_seconds / step.saturating_sub(steps.start) as f64 * steps.end.saturating_sub(step) as f64
}

/// Formats seconds in at most two units.
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
    use super::*;

    #[test]
    fn the_remaining_time_is_extrapolated_from_the_steps_of_this_run() {
        assert_eq!(seconds_left(&(0..20), 5, 10.0), 30.0);
        assert_eq!(seconds_left(&(10..20), 15, 10.0), 10.0, "steps before the resume do not count");
    }

    #[test]
    fn durations_have_at_most_two_units() {
        assert_eq!([4.4, 64.0, 3700.0].map(duration), ["4 s", "1 min 04 s", "1 h 01 min"]);
    }
}
