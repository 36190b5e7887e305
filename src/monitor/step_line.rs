//! The progress line of a step.

use super::Metrics;
use super::table::format_bytes;
use std::iter::once;

/// Maximum number of columns of a line, however wide the terminal.
pub const MAX_COLUMNS: usize = 100;

/// Returns the line of a step in `columns` columns. If it does not fit, the alignment is dropped first, then the number of
/// the last step, then the last fields.
pub(super) fn step_line(metrics: &Metrics, last_step: u64, columns: usize) -> String {
    let Metrics { step, .. } = metrics;
    let label = step_label(*step, last_step);
    if metrics.skipped {
        return format!("{label}  skipped: {}", skip_reason(metrics));
    }
    let aligned = once(label).chain(fields(metrics, true)).collect::<Vec<_>>().join("  ");
    let bare = fields(metrics, false);
    let join = |label: String, count: usize| {
        once(label).chain(bare[..count].iter().cloned()).collect::<Vec<_>>().join("  ")
    };
    let shorter = once(join(format!("step {step}/{last_step}"), bare.len()))
        .chain((1..=bare.len()).rev().map(|count| join(format!("step {step}"), count)));
    first_that_fits(once(aligned).chain(shorter), columns).trim_end().to_owned()
}

/// Returns two lines for a live display, which shows the step elsewhere: loss and rates, and the parts of the step time, if
/// the engine measured it.
pub fn live_lines(metrics: &Metrics, columns: usize) -> String {
    format!("{}\n{}", live_line(metrics, columns), cut(&times(metrics), columns))
}

fn live_line(metrics: &Metrics, columns: usize) -> String {
    let fields = match metrics.skipped {
        true => once("skipped".to_owned()).chain(machine(metrics)).collect(),
        false => fields(metrics, false),
    };
    cut(&fields, columns)
}

/// Returns the parts of the step time, if the engine measured it.
fn times(metrics: &Metrics) -> Vec<String> {
    let Metrics { time, step_seconds, data_seconds, .. } = metrics;
    if time.forward_seconds == 0.0 {
        return Vec::new();
    }
    let parts = [("compute", time.compute_seconds), ("all-to-all", time.all_to_all_seconds)].into_iter();
    let of_axes =
        [("ring", time.ring_seconds), ("tp", time.tp_comm_seconds), ("other stages", time.pp_comm_seconds)];
    let of_axes = of_axes.into_iter().filter(|(_, seconds)| *seconds > 0.0);
    let parts =
        parts.chain(of_axes).chain([("other comm", time.other_comm_seconds()), ("data", *data_seconds)]);
    parts.map(|(what, seconds)| format!("{what} {:.0} %", 100.0 * seconds / step_seconds)).collect()
}

/// Returns the step and the last step, with the same width for every step.
pub(super) fn step_label(step: u64, last_step: u64) -> String {
    let width = last_step.to_string().len();
    format!("step {step:>width$}/{last_step}")
}

/// Joins as many of the first fields as fit, at least one.
fn cut(fields: &[String], columns: usize) -> String {
    first_that_fits((1..=fields.len()).rev().map(|count| fields[..count].join(", ")), columns)
}

/// Returns the first line with at most `columns` columns, or the last one.
fn first_that_fits(lines: impl Iterator<Item = String>, columns: usize) -> String {
    let mut last = String::new();
    for line in lines {
        if line.chars().count() <= columns {
            return line;
        }
        last = line;
    }
    last
}

/// Returns loss, learning rate, gradient norm, throughput, memory and utilization. Aligned fields have the same width in
/// every line, for values of usual size.
fn fields(metrics: &Metrics, are_aligned: bool) -> Vec<String> {
    let Metrics { loss, lr, grad_norm, .. } = metrics;
    let width = |width: usize| if are_aligned { width } else { 0 };
    let (loss, lr, grad_norm) = (fixed(*loss, 4), learning_rate(*lr), fixed(*grad_norm, 3));
    let learned = [
        format!("loss {loss:<0$}", width(7)),
        format!("lr {lr:<0$}", width(7)),
        format!("grad norm {grad_norm:<0$}", width(5)),
    ];
    let [tokens, machine @ ..] = &machine(metrics)[..] else { return learned.into() };
    let tokens = format!("{tokens:>0$}", width(14));
    learned.into_iter().chain(once(tokens)).chain(machine.iter().cloned()).collect()
}

/// Returns throughput, memory and utilization, if known.
fn machine(metrics: &Metrics) -> Vec<String> {
    let tokens = format!("{:.0} tokens/s", metrics.tokens_per_second);
    let memory =
        (metrics.memory_bytes > 0).then(|| format!("mem {}", format_bytes(metrics.memory_bytes as f64)));
    // Without a known peak, there is a rate in place of the MFU.
    let utilization = match (metrics.gemm_share, metrics.model_flops_per_second) {
        (Some(share), _) => Some(format!("MFU {:.0} %", 100.0 * share)),
        (None, rate) => rate.map(|rate| format!("{:.1} TFLOP/s", rate / 1e12)),
    };
    once(tokens).chain(memory).chain(utilization).collect()
}

fn skip_reason(metrics: &Metrics) -> String {
    let scale = metrics.loss_scale;
    match metrics.overflow {
        true if scale >= 1e9 => format!("the gradient overflowed, with a loss scale of {scale:e}"),
        true => format!("the gradient overflowed, with a loss scale of {scale}"),
        false => "no token of the batch has a label".to_owned(),
    }
}

fn learning_rate(lr: f64) -> String {
    if lr == 0.0 { "0".to_owned() } else { format!("{lr:.2e}") }
}

/// Formats a number with `decimals` decimals, or in scientific notation if it is too large for a column.
fn fixed(value: f64, decimals: usize) -> String {
    if value.is_finite() && value.abs() >= 1e5 {
        format!("{value:.2e}")
    } else {
        format!("{value:.decimals$}")
    }
}

#[cfg(test)]
mod tests {
    use super::super::TimeShares;
    use super::*;

    fn metrics() -> Metrics {
        Metrics {
            step: 10,
            loss: 4.7114,
            lr: 1.2e-3,
            grad_norm: 2.6124,
            tokens_per_second: 27749.4,
            memory_bytes: 3 << 29,
            gemm_share: Some(0.52),
            ..Metrics::default()
        }
    }

    #[test]
    fn a_line_has_loss_rate_norm_throughput_memory_and_mfu() {
        let expected =
            "step  10/200  loss 4.7114   lr 1.20e-3  grad norm 2.612  27749 tokens/s  mem 1.50 GiB  MFU 52 %";
        assert_eq!(step_line(&metrics(), 200, MAX_COLUMNS), expected);
        let on_gpus = Metrics { gemm_share: None, model_flops_per_second: Some(1.25e14), ..metrics() };
        assert!(step_line(&on_gpus, 200, MAX_COLUMNS).ends_with("mem 1.50 GiB  125.0 TFLOP/s"));
        let unknown = Metrics { memory_bytes: 0, gemm_share: None, ..metrics() };
        assert!(step_line(&unknown, 200, MAX_COLUMNS).ends_with("27749 tokens/s"));
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
        let time = TimeShares { ring_seconds: 0.2, tp_comm_seconds: 0.4, compute_seconds: 0.6, ..time };
        let metrics = Metrics { time, ..metrics };
        assert_eq!(
            times(&metrics).join(", "),
            "compute 30 %, all-to-all 25 %, ring 10 %, tp 20 %, other comm 10 %, data 5 %"
        );
    }

    #[test]
    fn lines_fit_any_terminal_and_leave_out_the_last_fields_first() {
        let large = Metrics {
            step: 1_234_567,
            loss: f64::from(f32::MAX),
            grad_norm: 1e30,
            tokens_per_second: 1.5e8,
            memory_bytes: 1 << 50,
            ..metrics()
        };
        for metrics in [metrics(), large] {
            for columns in [100, 80, 60, 40, 30] {
                let (line, live) = (step_line(&metrics, 10_000_000, columns), live_line(&metrics, columns));
                assert!(line.chars().count() <= columns && live.chars().count() <= columns, "{line}\n{live}");
                assert!(line.contains("loss ") && live.contains("loss "), "{line}\n{live}");
            }
        }
        let [wide, narrow] = [80, 40].map(|columns| step_line(&metrics(), 200, columns));
        assert_eq!(wide, "step 10  loss 4.7114  lr 1.20e-3  grad norm 2.612  27749 tokens/s  mem 1.50 GiB");
        assert_eq!(narrow, "step 10  loss 4.7114  lr 1.20e-3");
    }

    #[test]
    fn steps_of_one_run_are_aligned() {
        let early = Metrics { step: 1, loss: 10.3448, lr: 0.0, tokens_per_second: 915.2, ..metrics() };
        let (early, late) = (step_line(&early, 200, MAX_COLUMNS), step_line(&metrics(), 200, MAX_COLUMNS));
        assert_eq!(early.find("grad norm"), late.find("grad norm"), "{early}\n{late}");
        assert_eq!(early.find("tokens/s"), late.find("tokens/s"), "{early}\n{late}");
    }

    #[test]
    fn skipped_steps_say_why() {
        let skipped = Metrics { skipped: true, ..metrics() };
        assert_eq!(
            step_line(&skipped, 20, MAX_COLUMNS),
            "step 10/20  skipped: no token of the batch has a label"
        );
        let overflow = |loss_scale| Metrics { overflow: true, loss_scale, ..skipped.clone() };
        let text = step_line(&overflow(512.0), 20, MAX_COLUMNS);
        assert!(text.ends_with("skipped: the gradient overflowed, with a loss scale of 512"), "{text}");
        assert!(step_line(&overflow(1e30), 10_000_000, MAX_COLUMNS).chars().count() <= MAX_COLUMNS);
    }
}
