//! The expected duration of a long first step.

use crate::output::log_line;
use ulysses::estimate::RankStep;
use ulysses::monitor::format_flops as flops;
use ulysses::trainer::job::PreparedJob;

/// Minimum duration of a first step that is announced.
const LONG_SECONDS: f64 = 10.0;

/// Typical FLOP rate of training as a share of the GEMM rate.
const TYPICAL_SHARE: f64 = 0.5;

/// Logs the expected duration of the first step if it is long. `peak` is the GEMM rate of all ranks.
pub(super) fn log(PreparedJob { config, model, mesh, .. }: &PreparedJob, seq_len: usize, peak: f64) {
    let config = config.clone().with_seq_len(seq_len);
    // Rank 0 is representative: ranks differ by few tokens or heads.
    let Ok(step) = RankStep::of(&config, &model.config, mesh, 0) else { return };
    let work = mesh.world_size() as f64 * step.flops.values().sum::<f64>();
    first_step(work, peak).into_iter().for_each(log_line);
}

fn first_step(work: f64, peak: f64) -> Option<String> {
    let seconds = work / (TYPICAL_SHARE * peak);
    (seconds > LONG_SECONDS).then(|| {
        format!(
            "estimated time of the first step: {} ({} at half of the measured GEMM rate of all ranks, which is {}/s)",
            duration(seconds),
            flops(work),
            flops(peak)
        )
    })
}

fn duration(seconds: f64) -> String {
    const UNITS: [(&str, f64); 4] = [("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0)];
    // At least two of the unit, so that a whole number is precise enough.
    let (unit, size) = UNITS.into_iter().find(|(_, size)| seconds >= 2.0 * size).unwrap_or(UNITS[3]);
    format!("{:.0} {unit}", seconds / size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_first_step_is_announced() {
        assert_eq!(first_step(4e9, 1e9), None);
        let expected = "estimated time of the first step: 20 s (10.00 GFLOP at half of the measured GEMM rate of all ranks, which is 1.00 GFLOP/s)";
        assert_eq!(first_step(10e9, 1e9).as_deref(), Some(expected));
        assert_eq!([119.0, 7200.0, 1e6].map(duration), ["119 s", "2 hours", "12 days"]);
    }
}
