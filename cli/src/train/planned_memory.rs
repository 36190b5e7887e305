//! Lines before the first step: the planned memory next to the available one, and how long the step takes if that is
//! long.

use super::available::{Available, in_process, on_machine};
use crate::log_line;
use crate::plan::longest_rows;
use crate::plan::table::{bytes, flops};
use ulysses::config::Config;
use ulysses::device::DeviceKind;
use ulysses::engine::EngineError;
use ulysses::engine::Moment;
use ulysses::estimate::{RankPlan, RankStep, Workload};
use ulysses::mesh::DeviceMesh;
use ulysses::model::LlamaConfig;

/// A first step that takes longer than this is announced.
const LONG_SECONDS: f64 = 10.0;

/// The share of the GEMM rate that training typically reaches.
const TYPICAL_SHARE: f64 = 0.5;

/// The planned peak memory of a rank.
pub(super) struct PlannedMemory {
    plan: RankPlan,
    device: DeviceKind,
}

impl PlannedMemory {
    /// Of the longest sequences of a run, whose ranks have so many threads and `local_ranks` share this machine;
    /// nothing where the plan does not cover the model.
    ///
    /// # Errors
    /// A step that is too large to count.
    pub(super) fn of(
        config: &Config,
        model: &LlamaConfig,
        device: DeviceKind,
        threads_per_rank: usize,
        local_ranks: usize,
    ) -> Result<Option<Self>, EngineError> {
        // As the ranks are started, whoever chose it.
        let mut config = config.clone();
        config.ulysses.threads_per_rank = Some(threads_per_rank);
        longest_rows(&mut config);
        let model = model.clone();
        let workload = Workload { config, model, document_len: None, ranks_per_node: local_ranks, device };
        match workload.plan() {
            Ok(plan) => Ok(Some(Self { plan, device })),
            Err(error @ EngineError::StepTooLarge { .. }) => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Host memory of a rank: of one on a GPU what it offloads.
    fn host_bytes(&self) -> u64 {
        match self.device {
            DeviceKind::Cpu => self.plan.peak_bytes,
            DeviceKind::Cuda => self.plan.offloaded_bytes,
        }
    }

    /// Compares it with the memory that is available: to the ranks of this machine, and to those of this process.
    pub(super) fn note(&self, ranks: [usize; 2]) {
        // Only the first run of a process trains.
        let _ = crate::settings::PLANNED_PEAK.set(self.clause());
        self.lines(ranks, [on_machine(), in_process()]).into_iter().for_each(log_line);
    }

    /// The planned peak, to go on an error of memory with.
    fn clause(&self) -> String {
        format!("; planned peak of a rank: {} ({})", bytes(self.plan.peak_bytes as f64), self.plan.peak_at)
    }

    /// The plan of a rank, then the ranks that share each limit with what is available to them.
    fn lines(&self, ranks: [usize; 2], available: [Option<Available>; 2]) -> Vec<String> {
        let of_rank = self.host_bytes();
        let planned = format!(
            "planned memory: {} per rank at its peak ({})",
            bytes(self.plan.peak_bytes as f64),
            self.plan.peak_at
        );
        if of_rank == 0 {
            return vec![planned];
        }
        let limits = ranks.into_iter().zip(available);
        let limits: Vec<_> = limits.filter_map(|(ranks, available)| Some((ranks, available?))).collect();
        let compared = limits.iter().map(|(ranks, Available { bytes: available, limit })| {
            let needed = bytes(of_rank.saturating_mul(*ranks as u64) as f64);
            format!(
                "; {needed} of host memory for {ranks} rank(s), {} available ({limit})",
                bytes(*available as f64)
            )
        });
        let exceeded = limits.iter().filter_map(|(ranks, Available { bytes: available, limit })| {
            let lacking = of_rank.saturating_mul(*ranks as u64).checked_sub(*available).filter(|lacking| *lacking > 0)?;
            Some(format!(
                "warning: the plan exceeds the available memory ({limit}) by {}: the run may end out of memory; `ulysses plan` \
                 lists single changes that need less",
                bytes(lacking as f64)
            ))
        });
        std::iter::once(planned + &compared.collect::<String>()).chain(exceeded).collect()
    }
}

/// How long the first step takes, where that is long: of sequences of `seq_len` tokens, on ranks that reach `peak_flops`
/// together.
pub(super) fn note_first_step(
    config: &Config,
    model: &LlamaConfig,
    mesh: &DeviceMesh,
    seq_len: usize,
    peak_flops: Option<f64>,
) {
    let Some(peak) = peak_flops else { return };
    let config = config.clone().with_seq_len(seq_len);
    // Ranks differ by few tokens or heads.
    let Ok(step) = RankStep::of(&config, model, mesh, 0) else { return };
    let work = mesh.world_size() as f64 * step.flops.values().sum::<f64>();
    first_step(work, peak).into_iter().for_each(log_line);
}

/// An error of memory that ran out, with the part of the step and the plan.
pub(super) fn explain_out_of_memory(
    error: anyhow::Error,
    part: Option<Moment>,
    planned: Option<&PlannedMemory>,
) -> anyhow::Error {
    if !is_out_of_memory(&error) {
        return error;
    }
    let part = part.map_or_else(|| "before the first step".to_owned(), |part| format!("during {part}"));
    let planned = planned.map_or_else(String::new, PlannedMemory::clause);
    error.context(format!("out of memory {part}{planned}"))
}

fn first_step(work: f64, peak: f64) -> Option<String> {
    let seconds = work / (TYPICAL_SHARE * peak);
    (seconds > LONG_SECONDS).then(|| {
        format!(
            "the first step takes about {}: {} at half of the GEMM rate of all ranks, {}/s",
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

/// As the drivers and the system word it.
fn is_out_of_memory(error: &anyhow::Error) -> bool {
    const SIGNS: [&str; 3] = ["out of memory", "out_of_memory", "cannot allocate memory"];
    error.chain().any(|cause| {
        let cause = cause.to_string().to_lowercase();
        SIGNS.iter().any(|sign| cause.contains(sign))
    })
}

#[cfg(test)]
mod tests {
    use super::super::available::Limit;
    use super::*;
    use ulysses::model::preset;

    const GIB: u64 = 1 << 30;

    fn planned(device: DeviceKind) -> PlannedMemory {
        let config = r#"{ "train_batch_size": 1, "ulysses": { "seq_len": 64 } }"#;
        let config = Config::from_json_str(config, "c.json").unwrap();
        let model = preset("nano").unwrap();
        let workload = Workload { config, model, document_len: None, ranks_per_node: 1, device };
        let plan = RankPlan { peak_bytes: 3 * GIB, offloaded_bytes: GIB, ..workload.plan().unwrap() };
        PlannedMemory { plan, device }
    }

    fn lines(device: DeviceKind, machine: u64, process: Option<u64>) -> Vec<String> {
        let machine = Available { bytes: machine * GIB, limit: Limit::ControlGroup };
        let process = process.map(|gib| Available { bytes: gib * GIB, limit: Limit::AddressSpace });
        planned(device).lines([4, 2], [Some(machine), process])
    }

    #[test]
    fn a_plan_that_exceeds_what_is_available_is_warned_of_with_both_numbers() {
        let fits = lines(DeviceKind::Cpu, 12, None);
        assert_eq!(fits.len(), 1, "{fits:?}");
        assert!(fits[0].starts_with("planned memory: 3.00 GiB per rank at its peak ("), "{fits:?}");
        let both = "; 12.00 GiB of host memory for 4 rank(s), 12.00 GiB available (the cgroup's limit)";
        assert!(fits[0].ends_with(both), "{fits:?}");
        let exceeds = lines(DeviceKind::Cpu, 10, Some(5));
        assert_eq!(exceeds.len(), 3, "{exceeds:?}");
        for (line, expected) in
            exceeds[1..].iter().zip(["the cgroup's limit) by 2.00 GiB", "process) by 1.00 GiB"])
        {
            assert!(line.starts_with("warning: ") && line.contains(expected), "{line}");
        }
    }

    #[test]
    fn of_a_gpu_only_what_is_offloaded_takes_host_memory() {
        let lines = lines(DeviceKind::Cuda, 3, None);
        assert!(
            lines[0].contains("; 4.00 GiB of host memory for 4 rank(s)") && lines.len() == 2,
            "{lines:?}"
        );
    }

    #[test]
    fn a_long_first_step_is_announced() {
        assert_eq!(first_step(4e9, 1e9), None);
        let expected = "the first step takes about 20 s: 10.00 GFLOP at half of the GEMM rate of all ranks, 1.00 GFLOP/s";
        assert_eq!(first_step(10e9, 1e9).as_deref(), Some(expected));
        assert_eq!([119.0, 7200.0, 1e6].map(duration), ["119 s", "2 hours", "12 days"]);
    }

    #[test]
    fn errors_of_memory_are_known_by_their_words() {
        for (message, is_memory) in [
            ("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")", true),
            ("Cannot allocate memory (os error 12)", true),
            ("rank 1 left", false),
        ] {
            let error = anyhow::anyhow!(message).context("step 3");
            assert_eq!(is_out_of_memory(&error), is_memory, "{message}");
        }
    }
}
