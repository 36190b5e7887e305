//! [`PlannedMemory`]: the memory that a job will need, compared with what is available.

use super::available::{Available, in_process, on_gpu, on_machine};
use crate::engine::EngineError;
use crate::estimate::{RankPlan, Workload};
use crate::kernels::device::DeviceKind;
use crate::kernels::memory::Category;
use crate::monitor::{counted, format_bytes as bytes};

/// How many ranks share the memory of a machine, a process and a GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sharing {
    pub(super) machine: usize,
    pub(super) process: usize,
    pub(super) gpu: usize,
}

/// The bytes that ranks need together of memory that they share.
struct Need {
    ranks: usize,
    bytes: u64,
    available: Available,
}

/// The planned peak memory per rank.
pub struct PlannedMemory {
    plan: RankPlan,
    device: DeviceKind,
}

impl PlannedMemory {
    /// Plans a run; `None` if the model cannot be planned.
    ///
    /// # Errors
    /// A step whose size overflows.
    pub(super) fn new(workload: Workload) -> Result<Option<Self>, EngineError> {
        let device = workload.device;
        match workload.plan() {
            Ok(plan) => Ok(Some(Self { plan, device })),
            Err(error @ EngineError::StepTooLarge { .. }) => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Returns the bytes per rank that each limit of [`limits`](Self::limits) applies to: on GPUs host memory has only offloaded tensors.
    fn bytes(&self) -> [u64; 3] {
        let RankPlan { peak_bytes, offloaded_bytes, .. } = self.plan;
        match self.device {
            DeviceKind::Cpu => [peak_bytes, peak_bytes, 0],
            DeviceKind::Cuda => [offloaded_bytes, offloaded_bytes, peak_bytes],
        }
    }

    /// Returns the memory that is available on this machine, to this process, and on a GPU.
    fn limits(&self) -> [Option<Available>; 3] {
        [on_machine(), in_process(), if self.device == DeviceKind::Cuda { on_gpu() } else { None }]
    }

    /// Returns whether the available memory is enough, as far as it is known.
    pub(super) fn fits(&self, ranks: Sharing) -> bool {
        self.needs(ranks, self.limits()).iter().all(|need| need.bytes <= need.available.bytes)
    }

    /// Returns what is needed of each limit.
    fn needs(&self, ranks: Sharing, limits: [Option<Available>; 3]) -> Vec<Need> {
        let Sharing { machine, process, gpu } = ranks;
        let each = [machine, process, gpu].into_iter().zip(self.bytes()).zip(limits);
        let need = |((ranks, bytes), limit): ((usize, u64), Option<Available>)| {
            Some(Need { ranks, bytes: bytes.saturating_mul(ranks as u64), available: limit? })
        };
        each.filter_map(need).filter(|need| need.bytes > 0).collect()
    }

    /// Returns the line for a plan that does not fit, because of which attention is recomputed.
    pub(super) fn recomputed_attention(&self) -> String {
        format!(
            "attention is recomputed: with `ulysses.save_attention_output` the planned peak would be {} per rank",
            bytes(self.plan.peak_bytes as f64)
        )
    }

    /// Formats the plan next to the available memory.
    pub(super) fn lines(&self, ranks: Sharing) -> Vec<String> {
        self.lines_with(ranks, self.limits())
    }

    /// Returns the planned peak, by category, as an addition to an out-of-memory error. A GPU's driver knows no categories.
    pub fn clause(&self) -> String {
        let RankPlan { peak_bytes, peak_at, peak_by_category, .. } = &self.plan;
        let parts = Category::ALL.into_iter().zip(*peak_by_category).filter(|(_, part)| *part > 0);
        let parts: Vec<String> =
            parts.map(|(category, part)| format!("{} {}", category.name(), bytes(part as f64))).collect();
        format!("; planned peak: {} per rank ({peak_at}): {}", bytes(*peak_bytes as f64), parts.join(", "))
    }

    /// Formats the plan, then one warning for each limit that it exceeds.
    fn lines_with(&self, ranks: Sharing, limits: [Option<Available>; 3]) -> Vec<String> {
        let RankPlan { peak_bytes, peak_at, .. } = &self.plan;
        let planned = format!("planned peak memory: {} per rank ({peak_at})", bytes(*peak_bytes as f64));
        let needs = self.needs(ranks, limits);
        let compared = needs.iter().map(|Need { ranks, bytes: needed, available }| {
            let [needed, limited] = [*needed, available.bytes].map(|amount| bytes(amount as f64));
            let limit = available.limit;
            format!(
                "; {} of {}: {needed} of {limited} available ({limit})",
                limit.memory(),
                counted(*ranks, "rank")
            )
        });
        let exceeded = needs.iter().filter_map(|Need { bytes: needed, available, .. }| {
            let lacking = needed.checked_sub(available.bytes).filter(|lacking| *lacking > 0)?;
            let limit = available.limit;
            Some(format!(
                "warning: the planned memory exceeds the available {} ({limit}) by {}; the run may run out of memory. \
                 `ulysses plan` lists single changes that need less",
                limit.memory(),
                bytes(lacking as f64)
            ))
        });
        std::iter::once(planned + &compared.collect::<String>()).chain(exceeded).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::available::Limit;
    use super::*;
    use crate::config::Config;
    use crate::model::preset;

    const GIB: u64 = 1 << 30;
    const SHARING: Sharing = Sharing { machine: 4, process: 2, gpu: 1 };

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
        planned(device).lines_with(SHARING, [Some(machine), process, None])
    }

    #[test]
    fn a_plan_that_exceeds_the_available_memory_gets_a_warning_with_both_numbers() {
        let fits = lines(DeviceKind::Cpu, 12, None);
        assert_eq!(fits.len(), 1, "{fits:?}");
        assert!(fits[0].starts_with("planned peak memory: 3.00 GiB per rank ("), "{fits:?}");
        let both = "; host memory of 4 ranks: 12.00 GiB of 12.00 GiB available (cgroup limit)";
        assert!(fits[0].ends_with(both), "{fits:?}");
        let exceeds = lines(DeviceKind::Cpu, 10, Some(5));
        assert_eq!(exceeds.len(), 3, "{exceeds:?}");
        for (line, expected) in
            exceeds[1..].iter().zip(["(cgroup limit) by 2.00 GiB", "(ulimit -v) by 1.00 GiB"])
        {
            assert!(line.starts_with("warning: ") && line.contains(expected), "{line}");
        }
    }

    #[test]
    fn a_plan_fits_if_no_limit_is_exceeded() {
        let fits = |machine: u64, process: Option<u64>| {
            let available = |gib: u64| Available { bytes: gib * GIB, limit: Limit::Machine };
            let limits = [Some(available(machine)), process.map(available), None];
            let needs = planned(DeviceKind::Cpu).needs(SHARING, limits);
            needs.iter().all(|need| need.bytes <= need.available.bytes)
        };
        assert!(fits(12, None) && fits(12, Some(6)));
        assert!(!fits(11, None) && !fits(12, Some(5)));
        assert!(planned(DeviceKind::Cpu).needs(SHARING, [None; 3]).is_empty(), "nothing to compare with");
    }

    #[test]
    fn ranks_that_share_a_gpu_need_their_peaks_together() {
        let lines = |gib: u64| {
            let gpu = Available { bytes: gib * GIB, limit: Limit::Gpu };
            planned(DeviceKind::Cuda).lines_with(Sharing { gpu: 2, ..SHARING }, [None, None, Some(gpu)])
        };
        assert!(
            lines(6)[0].contains("; GPU memory of 2 ranks: 6.00 GiB of 6.00 GiB available (total less 4 GiB")
        );
        assert_eq!((lines(6).len(), lines(5).len()), (1, 2));
        assert!(lines(5)[1].contains("exceeds the available GPU memory ("), "{:?}", lines(5));
    }

    #[test]
    fn on_a_gpu_only_offloaded_tensors_take_host_memory() {
        let lines = lines(DeviceKind::Cuda, 3, None);
        assert!(lines[0].contains("; host memory of 4 ranks: 4.00 GiB") && lines.len() == 2, "{lines:?}");
    }

    #[test]
    fn the_planned_peak_is_explained_by_category() {
        let mut on_gpu = planned(DeviceKind::Cuda);
        on_gpu.plan.peak_by_category = [GIB, 0, 0, 2 * GIB, 0, 0];
        let part = &on_gpu.plan.peak_at;
        let clause =
            format!("; planned peak: 3.00 GiB per rank ({part}): parameters 1.00 GiB, activations 2.00 GiB");
        assert_eq!(on_gpu.clause(), clause);
    }
}
