//! The line of `wall_clock_breakdown`.

use super::Metrics;

/// Returns the phases of a step in milliseconds, under DeepSpeed's names. `bwd_allreduce` is the time in reductions and
/// gathers during the backward pass, `bwd_inner` the rest. Data loading and the Ulysses exchange, which is part of the
/// passes, come last.
pub fn breakdown(metrics: &Metrics) -> String {
    let time = &metrics.time;
    let parts = [
        ("fwd_microstep", time.forward_seconds),
        ("bwd_microstep", time.backward_seconds),
        ("bwd_inner_microstep", time.backward_seconds - time.reduce_seconds),
        ("bwd_allreduce_microstep", time.reduce_seconds),
        ("step_microstep", time.update_seconds),
        ("data", metrics.data_seconds),
        ("all_to_all", time.all_to_all_seconds),
    ];
    let parts = parts.map(|(name, seconds)| format!(" | {name}: {:.2}", 1e3 * seconds));
    format!("time (ms){}", parts.concat())
}

#[cfg(test)]
mod tests {
    use super::super::TimeShares;
    use super::*;

    #[test]
    fn the_phases_have_deepspeeds_names() {
        let time = TimeShares {
            forward_seconds: 0.5,
            backward_seconds: 1.0,
            reduce_seconds: 0.25,
            update_seconds: 0.125,
            all_to_all_seconds: 0.0625,
            ..TimeShares::default()
        };
        let line = breakdown(&Metrics { time, data_seconds: 0.001, ..Metrics::default() });
        let expected = "time (ms) | fwd_microstep: 500.00 | bwd_microstep: 1000.00 | bwd_inner_microstep: 750.00 \
                        | bwd_allreduce_microstep: 250.00 | step_microstep: 125.00 | data: 1.00 | all_to_all: 62.50";
        assert_eq!(line, expected);
    }
}
