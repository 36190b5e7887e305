//! [`RankPlan`]: the memory, FLOPs and traffic of one rank's step.

use super::dry_run::DryStep;
use super::event::{Event, Pass, Purpose};
use super::nodes::{Nodes, SentBytes};
use crate::engine::{PartPeak, StepPart};
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use ulysses_kernels::memory::Category;

/// Bytes by category, in the order of [`Category::ALL`].
type ByCategory = [u64; Category::ALL.len()];

/// The memory, FLOPs and traffic of one rank's step, after the first one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankPlan {
    /// Global rank.
    pub rank: usize,
    /// Peak memory.
    pub peak_bytes: u64,
    /// The part of the step with the peak.
    #[serde(serialize_with = "as_text")]
    pub peak_at: StepPart,
    /// The peak by category.
    #[serde(serialize_with = "by_name")]
    pub peak_by_category: ByCategory,
    /// Memory that is held throughout, without recycled storage.
    pub persistent_bytes: u64,
    /// Peak of the offloaded bytes: in files, or of a GPU in host memory.
    pub offloaded_bytes: u64,
    /// Peak memory in each part of the last micro batch, and in the update. On a pipeline stage, backward passes of earlier micro
    /// batches follow its forward pass: each part is there once, with its largest peak.
    pub timeline: Vec<MomentMemory>,
    /// FLOPs of forward and backward passes.
    pub model_flops: f64,
    /// FLOPs of recomputation.
    pub recompute_flops: f64,
    /// Bytes sent.
    pub sent: SentBytes,
    /// Bytes sent by purpose.
    #[serde(serialize_with = "by_purpose")]
    pub sent_by_purpose: BTreeMap<Purpose, SentBytes>,
}

/// The peak memory of a rank in a part of a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MomentMemory {
    /// The part of the step.
    #[serde(serialize_with = "as_text")]
    pub at: StepPart,
    /// Total bytes.
    pub bytes: u64,
    /// Bytes by category.
    #[serde(serialize_with = "by_name")]
    pub by_category: ByCategory,
}

impl RankPlan {
    /// Returns the plan that needs most memory, the first of equal ones.
    pub(super) fn largest(plans: Vec<Self>) -> Self {
        // `max_by_key` takes the last.
        let largest = plans.into_iter().rev().max_by_key(|plan| plan.peak_bytes);
        largest.unwrap_or_else(|| unreachable!("a mesh has a rank"))
    }

    /// Sums a step; `None` if its bytes overflow.
    pub(super) fn sum(rank: usize, step: DryStep, nodes: &Nodes) -> Option<Self> {
        let mut sent_by_purpose: BTreeMap<Purpose, SentBytes> = BTreeMap::new();
        let (mut model_flops, mut recompute_flops) = (0.0, 0.0);
        for (times, event) in step.events() {
            match event {
                Event::Collective(transfer) => {
                    sent_by_purpose.entry(transfer.purpose).or_default().add(nodes.sent(transfer), times)?;
                }
                Event::Compute(work) => match work.pass {
                    Pass::Recompute => recompute_flops += times as f64 * work.flops,
                    Pass::Forward | Pass::Backward => model_flops += times as f64 * work.flops,
                },
                Event::Wait { .. }
                | Event::Elementwise { .. }
                | Event::File { .. }
                | Event::HostCopy { .. } => {}
            }
        }
        let moment = |part: &PartPeak| MomentMemory {
            at: part.at,
            bytes: part.peak.bytes,
            by_category: part.peak.by_category.values(),
        };
        let mut moments: Vec<MomentMemory> = step.parts.iter().map(moment).collect();
        let peak = moments.iter().rev().max_by_key(|moment| moment.bytes);
        let Some(peak) = peak.cloned() else { unreachable!("a step has moments") };
        let last_micro_batch =
            moments.iter().rposition(|moment| moment.at == StepPart::Embedding).unwrap_or(0);
        let mut sent = SentBytes::default();
        sent_by_purpose.values().try_for_each(|of_purpose| sent.add(*of_purpose, 1))?;
        Some(Self {
            rank,
            peak_bytes: peak.bytes,
            peak_at: peak.at,
            peak_by_category: peak.by_category,
            persistent_bytes: step.persistent_bytes,
            offloaded_bytes: step.offloaded_bytes,
            timeline: largest_of_each_part(moments.split_off(last_micro_batch)),
            model_flops,
            recompute_flops,
            sent,
            sent_by_purpose,
        })
    }
}

/// Keeps each part once, in the order of their first peaks.
fn largest_of_each_part(moments: Vec<MomentMemory>) -> Vec<MomentMemory> {
    let mut parts: Vec<MomentMemory> = Vec::with_capacity(moments.len());
    for moment in moments {
        match parts.iter_mut().find(|part| part.at == moment.at) {
            Some(part) if part.bytes < moment.bytes => *part = moment,
            Some(_) => {}
            None => parts.push(moment),
        }
    }
    parts
}

fn as_text<S: Serializer>(moment: &StepPart, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(moment)
}

fn by_name<S: Serializer>(bytes: &ByCategory, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(Category::ALL.iter().map(|category| category.name()).zip(bytes))
}

fn by_purpose<S: Serializer>(sent: &BTreeMap<Purpose, SentBytes>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(sent.iter().map(|(purpose, sent)| (purpose.to_string().replace(' ', "_"), sent)))
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::estimate::{RankPlan, Workload};
    use crate::model::{ModelConfig, preset};
    use serde_json::{Value, json};
    use ulysses_kernels::device::DeviceKind;

    const SEQ_LEN: usize = 4096;

    /// Plans the preset `small` on one rank.
    fn plan(device: DeviceKind, checkpoints: bool, zero: Value) -> RankPlan {
        let config = json!({
            "train_batch_size": 1, "bf16": { "enabled": true }, "zero_optimization": zero,
            "activation_checkpointing": { "cpu_checkpointing": checkpoints },
            "ulysses": { "seq_len": SEQ_LEN, "activation_checkpointing": true, "tile_tokens": 512 },
        });
        let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
        let model = preset("small").unwrap();
        Workload { config, model, document_len: None, ranks_per_node: 1, device }.plan().unwrap()
    }

    #[test]
    fn checkpoints_of_a_gpu_are_in_host_memory_except_those_in_transfer() {
        let model = preset("small").unwrap();
        let checkpoint = (SEQ_LEN * model.hidden_size * 2) as u64;
        let stage = || json!({ "stage": 0 });
        let [on_gpu, offloaded] = [false, true].map(|offloads| plan(DeviceKind::Cuda, offloads, stage()));
        assert_eq!(
            (on_gpu.offloaded_bytes, offloaded.offloaded_bytes),
            (0, model.num_layers() as u64 * checkpoint)
        );
        // One is copied in while one is used, and one is copied out while the next layer runs.
        assert!(on_gpu.peak_bytes - offloaded.peak_bytes >= (model.num_layers() as u64 - 3) * checkpoint);
        // A file needs a buffer, but no tensor for prefetching.
        let in_file = plan(DeviceKind::Cpu, true, stage());
        assert_eq!(in_file.offloaded_bytes, offloaded.offloaded_bytes);
        assert!(in_file.peak_bytes < offloaded.peak_bytes + (1 << 17));
    }

    /// f32 parameters, which are copied to the host for the update: at most three pieces of 1 GiB at a time.
    #[test]
    fn a_unit_larger_than_1_gib_is_updated_in_pieces() {
        let config = json!({
            "train_batch_size": 1, "zero_optimization": { "stage": 3, "offload_optimizer": { "device": "cpu" } },
            "ulysses": { "seq_len": 8 },
        });
        let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
        let model = ModelConfig { vocab_size: 8 << 20, ..preset("nano").unwrap().with_num_layers(1) };
        let numel = model.num_parameters() as u64;
        let embedding = (model.vocab_size * model.hidden_size * 4) as u64;
        assert!(embedding >= 2 << 30);
        let device = DeviceKind::Cuda;
        let workload = Workload { config, model, document_len: None, ranks_per_node: 1, device };
        // Gradients and two moments, and padding of small parameters.
        let copies = workload.plan().unwrap().offloaded_bytes - 3 * 4 * numel;
        assert!((1 << 30..=3 << 30).contains(&copies), "{copies}");
    }

    #[test]
    fn offload_to_cpu_moves_state_of_a_gpu_but_not_of_a_cpu() {
        let padded = preset("small").unwrap().num_parameters() as u64;
        let cpu = json!({ "device": "cpu" });
        let of_stage = |stage: u8, sections: &[&str]| {
            let mut zero = json!({ "stage": stage });
            sections.iter().for_each(|section| zero[*section] = cpu.clone());
            zero
        };
        let optimizer = plan(DeviceKind::Cuda, false, of_stage(1, &["offload_optimizer"]));
        // The master copy and two moments; in the update also gradients and 16-bit parameters of some units.
        assert!(
            (12 * padded..18 * padded).contains(&optimizer.offloaded_bytes),
            "{}",
            optimizer.offloaded_bytes
        );
        let both = plan(DeviceKind::Cuda, false, of_stage(3, &["offload_optimizer", "offload_param"]));
        // Gradients and parameters as well.
        assert_eq!(both.offloaded_bytes, 18 * padded);
        let plain = plan(DeviceKind::Cuda, false, of_stage(3, &[]));
        assert_eq!(plain.persistent_bytes - both.persistent_bytes, 18 * padded);
        let on_cpu = plan(DeviceKind::Cpu, false, of_stage(3, &["offload_optimizer", "offload_param"]));
        let plain = plan(DeviceKind::Cpu, false, of_stage(3, &[]));
        assert_eq!((on_cpu.offloaded_bytes, on_cpu.peak_bytes), (0, plain.peak_bytes));
    }
}
