//! Log lines before the first step: planned and available memory, and the expected duration of a long step.

use super::available::{Available, in_process, on_gpu, on_machine};
use crate::output::log_line;
use crate::plan::use_longest_sequences;
use ulysses::config::{Config, Offload, PartitionAxes, ZeroStage};
use ulysses::device::DeviceKind;
use ulysses::engine::{Engine, EngineError};
use ulysses::estimate::{RankPlan, RankStep, Workload};
use ulysses::memory::{ByCategory, Category};
use ulysses::mesh::DeviceMesh;
use ulysses::model::ModelConfig;
use ulysses::monitor::{counted, format_bytes as bytes, format_flops as flops};
use ulysses::trainer::job::PreparedJob;

/// Minimum duration of a first step that is announced.
const LONG_SECONDS: f64 = 10.0;

/// Typical FLOP rate of training as a share of the GEMM rate.
const TYPICAL_SHARE: f64 = 0.5;

/// The planned peak memory per rank.
pub(super) struct PlannedMemory {
    plan: RankPlan,
    device: DeviceKind,
}

impl PlannedMemory {
    /// Plans a run's longest sequences; `None` if the model cannot be planned. `local_ranks` ranks share this machine.
    ///
    /// # Errors
    /// A step whose size overflows.
    pub(super) fn of(job: &PreparedJob, local_ranks: usize) -> Result<Option<Self>, EngineError> {
        // The value that the ranks are started with.
        let mut config = job.config.clone();
        config.ulysses.threads_per_rank = Some(job.launch.threads_per_rank);
        use_longest_sequences(&mut config);
        let (model, device) = (job.model.config.clone(), job.placement.device);
        let workload = Workload { config, model, document_len: None, ranks_per_node: local_ranks, device };
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

    /// Returns whether the available memory is enough, as far as it is known. `ranks`: as for [`log`](Self::log).
    pub(super) fn fits(&self, ranks: [usize; 3]) -> bool {
        self.needs(ranks, self.limits()).iter().all(|(_, bytes, available)| *bytes <= available.bytes)
    }

    /// Returns the ranks that share each limit, the bytes that they need together, and the limit.
    fn needs(&self, ranks: [usize; 3], limits: [Option<Available>; 3]) -> Vec<(usize, u64, Available)> {
        let each = ranks.into_iter().zip(self.bytes()).zip(limits);
        let needs = each
            .filter_map(|((ranks, bytes), limit)| Some((ranks, bytes.saturating_mul(ranks as u64), limit?)));
        needs.filter(|(_, bytes, _)| *bytes > 0).collect()
    }

    /// Prints that attention is recomputed, because with its saved output this plan does not fit.
    pub(super) fn log_recomputed_attention(&self) {
        log_line(format_args!(
            "attention is recomputed: with `ulysses.save_attention_output` the planned peak would be {} per rank",
            bytes(self.plan.peak_bytes as f64)
        ));
    }

    /// Prints the plan next to the available memory. `ranks`: how many share this machine, this process and a GPU.
    pub(super) fn log(&self, ranks: [usize; 3]) {
        // A process trains once.
        let _ = crate::settings::PLANNED_PEAK.set(self.clause());
        self.lines(ranks, self.limits()).into_iter().for_each(log_line);
    }

    /// Returns the planned peak, by category, as an addition to an out-of-memory error. A GPU's driver knows no categories.
    fn clause(&self) -> String {
        let RankPlan { peak_bytes, peak_at, peak_by_category, .. } = &self.plan;
        let parts = Category::ALL.into_iter().zip(*peak_by_category).filter(|(_, part)| *part > 0);
        let parts: Vec<String> =
            parts.map(|(category, part)| format!("{} {}", category.name(), bytes(part as f64))).collect();
        format!("; planned peak: {} per rank ({peak_at}): {}", bytes(*peak_bytes as f64), parts.join(", "))
    }

    /// Formats the plan, then one warning for each limit that it exceeds.
    fn lines(&self, ranks: [usize; 3], limits: [Option<Available>; 3]) -> Vec<String> {
        let RankPlan { peak_bytes, peak_at, .. } = &self.plan;
        let planned = format!("planned peak memory: {} per rank ({peak_at})", bytes(*peak_bytes as f64));
        let needs = self.needs(ranks, limits);
        let compared = needs.iter().map(|(ranks, needed, Available { bytes: available, limit })| {
            let [needed, available] = [needed, available].map(|amount| bytes(*amount as f64));
            format!(
                "; {} of {}: {needed} of {available} available ({limit})",
                limit.memory(),
                counted(*ranks, "rank")
            )
        });
        let exceeded = needs.iter().filter_map(|(_, needed, Available { bytes: available, limit })| {
            let lacking = needed.checked_sub(*available).filter(|lacking| *lacking > 0)?;
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

/// Prints the expected duration of the first step if it is long. `peak` is the GEMM rate of all ranks.
pub(super) fn log_first_step(
    config: &Config,
    model: &ModelConfig,
    mesh: &DeviceMesh,
    seq_len: usize,
    peak: f64,
) {
    let config = config.clone().with_seq_len(seq_len);
    // Rank 0 is representative: ranks differ by few tokens or heads.
    let Ok(step) = RankStep::of(&config, model, mesh, 0) else { return };
    let work = mesh.world_size() as f64 * step.flops.values().sum::<f64>();
    first_step(work, peak).into_iter().for_each(log_line);
}

/// Adds to an out-of-memory error: the part of the step, the stored state, the planned peak, and what needs less memory.
pub(super) fn explain_out_of_memory(
    error: anyhow::Error,
    config: &Config,
    engine: Option<&Engine>,
    planned: Option<&PlannedMemory>,
) -> anyhow::Error {
    if !is_out_of_memory(&error) {
        return error;
    }
    let part = engine.and_then(Engine::part);
    let part = part.map_or_else(|| "before the first step".to_owned(), |part| format!("during {part}"));
    let state = engine.map_or_else(String::new, |engine| stored_state(engine.state_by_category()));
    let planned = planned.map_or_else(String::new, PlannedMemory::clause);
    let less = less_memory(config);
    error.context(format!("out of memory {part}{state}{planned}; to reduce memory: {less}"))
}

fn stored_state(state: ByCategory) -> String {
    let ByCategory { parameters, gradients, optimizer, .. } = state;
    let [parameters, gradients, optimizer] =
        [parameters, gradients, optimizer].map(|held| bytes(held as f64));
    format!("; stored state: parameters {parameters}, gradients {gradients}, optimizer {optimizer}")
}

/// Lists the next changes of the config that lower the peak, most effective first.
fn less_memory(config: &Config) -> String {
    let (ulysses, stage) = (&config.ulysses, u8::from(config.zero.stage));
    let stage = format!("`zero_optimization.stage`: {}", stage + 1);
    let is_over_sp = config.zero_axes() == PartitionAxes::DpSp;
    let axes = match config.zero.stage {
        ZeroStage::Disabled => {
            "`zero_optimization.stage`: 3 with `ulysses.zero_partition_axes`: [\"dp\", \"sp\"]"
        }
        _ => "`ulysses.zero_partition_axes`: [\"dp\", \"sp\"]",
    };
    let candidates = [
        (config.micro_batch_size > 1, "a smaller `train_micro_batch_size_per_gpu`"),
        (!ulysses.activation_checkpointing, "`ulysses.activation_checkpointing`: true"),
        (config.mesh.sp_size > 1 && !is_over_sp, axes),
        (config.zero.stage != ZeroStage::Parameters && config.zero_world_size() > 1, stage.as_str()),
        (ulysses.tile_tokens.is_none(), "`ulysses.tile_tokens`: 2048"),
        (config.zero.offload_optimizer == Offload::None, "`zero_optimization.offload_optimizer`"),
        (true, "more sp ranks (`--mesh`)"),
    ];
    let applicable = candidates.into_iter().filter(|(applies, _)| *applies).map(|(_, change)| change);
    applicable.take(3).collect::<Vec<_>>().join(", ")
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

/// Recognizes out-of-memory errors by the wording of drivers and system.
fn is_out_of_memory(error: &anyhow::Error) -> bool {
    const SIGNS: [&str; 4] =
        ["out of memory", "out of gpu memory", "out_of_memory", "cannot allocate memory"];
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
        planned(device).lines([4, 2, 1], [Some(machine), process, None])
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
            let needs = planned(DeviceKind::Cpu).needs([4, 2, 1], limits);
            needs.iter().all(|(_, bytes, available)| *bytes <= available.bytes)
        };
        assert!(fits(12, None) && fits(12, Some(6)));
        assert!(!fits(11, None) && !fits(12, Some(5)));
        assert!(planned(DeviceKind::Cpu).needs([4, 2, 1], [None; 3]).is_empty(), "nothing to compare with");
    }

    #[test]
    fn ranks_that_share_a_gpu_need_their_peaks_together() {
        let lines = |gib: u64| {
            let gpu = Available { bytes: gib * GIB, limit: Limit::Gpu };
            planned(DeviceKind::Cuda).lines([4, 2, 2], [None, None, Some(gpu)])
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
    fn a_long_first_step_is_announced() {
        assert_eq!(first_step(4e9, 1e9), None);
        let expected = "estimated time of the first step: 20 s (10.00 GFLOP at half of the measured GEMM rate of all ranks, which is 1.00 GFLOP/s)";
        assert_eq!(first_step(10e9, 1e9).as_deref(), Some(expected));
        assert_eq!([119.0, 7200.0, 1e6].map(duration), ["119 s", "2 hours", "12 days"]);
    }

    #[test]
    fn an_out_of_memory_error_names_the_keys_that_are_left() {
        let config = |text: &str| Config::from_json_str(text, "c.json").unwrap();
        let plain =
            r#"{ "train_micro_batch_size_per_gpu": 2, "mesh_param": [2, 1], "ulysses": { "seq_len": 64 } }"#;
        let plain = config(plain);
        let expected = "a smaller `train_micro_batch_size_per_gpu`, `ulysses.activation_checkpointing`: true, \
                        `zero_optimization.stage`: 1";
        assert_eq!(less_memory(&plain), expected);
        let small = r#"{ "train_batch_size": 1, "zero_optimization": { "stage": 3 },
                         "ulysses": { "seq_len": 64, "activation_checkpointing": true, "tile_tokens": 32 } }"#;
        let expected = "`zero_optimization.offload_optimizer`, more sp ranks (`--mesh`)";
        assert_eq!(less_memory(&config(small)), expected);
        let over_sp = |stage: u8, axes: &str| {
            let text = format!(
                r#"{{ "train_batch_size": 1, "mesh_param": [1, 8], "zero_optimization": {{ "stage": {stage} }},
                     "ulysses": {{ "seq_len": 64, "activation_checkpointing": true, "tile_tokens": 32,
                                   "zero_partition_axes": {axes} }} }}"#
            );
            less_memory(&config(&text))
        };
        let (axes, offload) =
            (r#"`ulysses.zero_partition_axes`: ["dp", "sp"]"#, "`zero_optimization.offload_optimizer`");
        assert_eq!(over_sp(2, r#"["dp"]"#), format!("{axes}, {offload}, more sp ranks (`--mesh`)"));
        let with_stage =
            format!("`zero_optimization.stage`: 3 with {axes}, {offload}, more sp ranks (`--mesh`)");
        assert_eq!(over_sp(0, r#"["dp"]"#), with_stage);
        let stage_3 = format!("`zero_optimization.stage`: 3, {offload}, more sp ranks (`--mesh`)");
        assert_eq!(over_sp(2, r#"["dp", "sp"]"#), stage_3);
        let error = || anyhow::anyhow!("out of GPU memory: requested 1.00 GiB");
        let explained = format!("{:#}", explain_out_of_memory(error(), &plain, None, None));
        assert!(
            explained.starts_with("out of memory before the first step; to reduce memory: "),
            "{explained}"
        );
        assert!(explained.ends_with(": out of GPU memory: requested 1.00 GiB"), "{explained}");
        let (mut on_gpu, part) = (planned(DeviceKind::Cuda), planned(DeviceKind::Cuda).plan.peak_at);
        on_gpu.plan.peak_by_category = [GIB, 0, 0, 2 * GIB, 0, 0];
        let explained = format!("{:#}", explain_out_of_memory(error(), &plain, None, Some(&on_gpu)));
        let categories = format!(
            "; planned peak: 3.00 GiB per rank ({part}): parameters 1.00 GiB, activations 2.00 GiB; to"
        );
        assert!(explained.contains(&categories), "{explained}");
    }

    #[test]
    fn out_of_memory_errors_are_recognized() {
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
