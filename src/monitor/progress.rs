//! Progress on standard error: a live line on a terminal, plain lines elsewhere.

use super::{EvalMetrics, Metrics, escaped};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::Write;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// What is drawn at the bottom of the terminal, if anything is.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Lets `write` write to the terminal above the live line, which would garble it otherwise.
pub fn above_progress<T>(write: impl FnOnce() -> T) -> T {
    let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
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
            *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
        }
        Self { steps, steps_per_print: steps_per_print.max(1), start: Instant::now(), bar }
    }

    /// Whether the turn of a step has come: the first, every `steps_per_print`-th, and the last.
    pub fn is_due(&self, step: u64) -> bool {
        step == self.steps.start + 1 || step == self.steps.end || step.is_multiple_of(self.steps_per_print)
    }

    /// Shows a step, and prints it if its turn has come or it was skipped.
    pub fn report(&self, metrics: &Metrics) {
        let left = self.seconds_left(metrics.step, self.start.elapsed().as_secs_f64());
        if self.is_due(metrics.step) || metrics.skipped {
            self.print(&self.line(metrics, left));
        }
        if !self.bar.is_hidden() {
            let Range { start, end } = self.steps;
            self.bar.set_position(metrics.step.saturating_sub(start));
            self.bar.set_prefix(format!("step {}/{end}, {} left", metrics.step, duration(left)));
            self.bar.set_message(live(metrics));
        }
    }

    /// Prints an evaluation.
    pub fn report_evaluation(&self, metrics: &EvalMetrics) {
        let EvalMetrics { step, eval_loss, eval_perplexity, eval_tokens, .. } = metrics;
        let end = self.steps.end;
        self.print(&format!(
            "step {step:>5}/{end}  held out: loss {eval_loss:.4}, perplexity {eval_perplexity:.3} ({eval_tokens} tokens)"
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

    fn line(&self, metrics: &Metrics, seconds_left: f64) -> String {
        let Metrics { step, loss, lr, grad_norm, tokens_per_second, .. } = metrics;
        let end = self.steps.end;
        if metrics.skipped {
            let why = match metrics.overflow {
                true => format!("the gradient overflowed, with a loss scale of {}", metrics.loss_scale),
                false => "no token of the batch has a label".to_owned(),
            };
            return format!("step {step:>5}/{end}  skipped: {why}");
        }
        let machine = [machine(metrics), times(metrics)].concat().join(", ");
        let line = format!(
            "step {step:>5}/{end}  loss {loss:<7.4} lr {lr:<9.2e} grad norm {grad_norm:<8.3} \
             {tokens_per_second:>8.0} tokens/s  {seconds_left:>4.0} s left  {machine}"
        );
        line.trim_end().to_owned()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        SHOWN.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.bar.finish_and_clear();
    }
}

/// The two lines below the bar.
fn live(metrics: &Metrics) -> String {
    let Metrics { loss, lr, grad_norm, tokens_per_second, .. } = metrics;
    let learnt = match metrics.skipped {
        true => "skipped".to_owned(),
        false => format!("loss {loss:.4}, lr {lr:.2e}, grad norm {grad_norm:.3}"),
    };
    let speed = [vec![format!("{tokens_per_second:.0} tokens/s")], machine(metrics)].concat().join(", ");
    format!("{learnt}, {speed}\n{}", times(metrics).join(", "))
}

/// How well the machine is used, as far as that is known.
fn machine(metrics: &Metrics) -> Vec<String> {
    const GIB: f64 = (1_u64 << 30) as f64;
    let share = metrics.gemm_share.map(|share| format!("{:.0} % of GEMM peak", 100.0 * share));
    let memory = (metrics.memory_bytes > 0).then(|| format!("{:.2} GiB", metrics.memory_bytes as f64 / GIB));
    share.into_iter().chain(memory).collect()
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

    fn metrics(step: u64, skipped: bool) -> Metrics {
        Metrics {
            step,
            loss: 2.5,
            lr: 1e-3,
            grad_norm: 0.5,
            tokens: 8192,
            tokens_per_second: 4096.0,
            step_seconds: 2.0,
            slowest_rank_ratio: 1.0,
            loss_scale: 1.0,
            skipped,
            ..Metrics::default()
        }
    }

    fn line(steps: Range<u64>, metrics: &Metrics, elapsed_seconds: f64) -> String {
        let progress = Progress::new(steps, 1);
        progress.line(metrics, progress.seconds_left(metrics.step, elapsed_seconds))
    }

    #[test]
    fn a_line_extrapolates_the_time_that_is_left() {
        let line = line(0..20, &metrics(5, false), 10.0);
        assert!(line.contains("step     5/20") && line.contains("30 s left"), "{line}");
    }

    #[test]
    fn steps_before_a_resumption_took_none_of_the_time() {
        let line = line(10..20, &metrics(15, false), 10.0);
        assert!(line.contains("step    15/20") && line.contains("10 s left"), "{line}");
    }

    #[test]
    fn skipped_steps_say_why() {
        let text = line(0..20, &metrics(5, true), 10.0);
        assert!(text.contains("skipped: no token"), "{text}");
        let overflow = Metrics { overflow: true, loss_scale: 512.0, ..metrics(5, true) };
        let text = line(0..20, &overflow, 10.0);
        assert!(text.contains("skipped: the gradient overflowed, with a loss scale of 512"), "{text}");
    }

    #[test]
    fn what_is_known_of_the_machine_and_the_time_is_told_and_nothing_else() {
        let time = TimeShares {
            forward_seconds: 1.0,
            all_to_all_seconds: 0.5,
            dp_comm_seconds: 0.1,
            sp_comm_seconds: 0.1,
            compute_seconds: 1.2,
            ..TimeShares::default()
        };
        let known = Metrics {
            time,
            data_seconds: 0.1,
            gemm_share: Some(0.52),
            memory_bytes: 3 << 29,
            ..metrics(5, false)
        };
        let text = line(0..20, &known, 10.0);
        let expected =
            "52 % of GEMM peak, 1.50 GiB, compute 60 %, all-to-all 25 %, other comm 10 %, data 5 %";
        assert!(text.ends_with(expected), "{text}");
        assert_eq!(live(&known).lines().last(), expected.split_once("GiB, ").map(|(_, times)| times));
        let text = line(0..20, &metrics(5, false), 10.0);
        assert!(text.ends_with("30 s left"), "{text}");
    }

    #[test]
    fn durations_are_told_in_two_units() {
        assert_eq!([4.4, 64.0, 3700.0].map(duration), ["4 s", "1 min 04 s", "1 h 01 min"]);
    }
}
