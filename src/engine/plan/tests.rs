//! A step whose repeated micro batches are counted is the step that lists each of them.

use super::{RankPlan, RankStep, Workload};
use crate::config::Config;
use crate::engine::EngineError;
use crate::engine::schedule::{Event, Schedule};
use crate::mesh::DeviceMesh;
use crate::model::{LlamaConfig, preset};
use serde_json::{Value, json};
use ulysses_kernels::device::DeviceKind;

/// Every stage, with every feature that keeps something from one micro batch to the next.
pub(super) fn cases() -> Vec<(&'static str, DeviceKind, Value)> {
    let with = |stage: u8, mesh: [usize; 2], extra: Value| {
        let mut config = json!({ "zero_optimization": { "stage": stage }, "mesh_param": mesh });
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        config
    };
    let ulysses = |section: Value| json!({ "ulysses": section });
    let recompute = || json!({ "activation_checkpointing": true });
    let away =
        || json!({ "activation_checkpointing": { "cpu_checkpointing": true }, "ulysses": recompute() });
    let offload = |device: &str| {
        let place = json!({ "device": device });
        let zero = json!({ "stage": 3, "offload_optimizer": place, "offload_param": place });
        json!({ "zero_optimization": zero, "bf16": { "enabled": true }, "ulysses": recompute() })
    };
    let frozen = json!({ "parameter_groups": [{ "match": "embed_tokens", "frozen": true }, { "match": "mlp", "frozen": true }] });
    let every_other = json!({ "activation_checkpointing": true, "activation_checkpointing_interval": 2 });
    let bounded = json!({ "activation_checkpointing": true, "tile_tokens": 5, "head_chunks": 2 });
    let hybrid = json!({ "zero_optimization": { "stage": 3, "mics_shard_size": 2 } });
    let (cpu, gpu) = (DeviceKind::Cpu, DeviceKind::Cuda);
    vec![
        ("stage 0", cpu, with(0, [1, 1], json!({}))),
        ("stage 0, sp 2", cpu, with(0, [1, 2], ulysses(recompute()))),
        ("stage 1, LAMB", cpu, with(1, [2, 1], json!({ "optimizer": { "type": "Lamb" } }))),
        ("stage 1, bf16", cpu, with(1, [2, 2], json!({ "bf16": { "enabled": true } }))),
        ("stage 2, means", cpu, with(2, [2, 2], json!({ "loss_normalization": "micro_batch" }))),
        ("stage 2, every other layer", cpu, with(2, [2, 1], ulysses(every_other))),
        ("stage 3", cpu, with(3, [2, 2], json!({}))),
        ("stage 3, tiles and chunks", cpu, with(3, [2, 2], ulysses(bounded.clone()))),
        ("stage 3, frozen", cpu, with(3, [2, 2], ulysses(frozen))),
        ("stage 3, hybrid", cpu, with(3, [4, 2], hybrid)),
        ("checkpoints in a file", cpu, with(2, [2, 2], away())),
        ("checkpoints in the host's memory", gpu, with(2, [2, 2], away())),
        ("state in files", cpu, with(3, [2, 2], offload("nvme"))),
        ("state in the host's memory", gpu, with(3, [2, 2], offload("cpu"))),
        ("a GPU's chunks", gpu, with(3, [1, 2], ulysses(bounded))),
    ]
}

fn model() -> LlamaConfig {
    LlamaConfig { num_layers: 3, ..preset("nano").unwrap() }
}

pub(super) fn workload(config: &Value, device: DeviceKind, accumulation: usize) -> Workload {
    let mut config = config.clone();
    config["train_micro_batch_size_per_gpu"] = json!(2);
    config["gradient_accumulation_steps"] = json!(accumulation);
    config["ulysses"]["seq_len"] = json!(26);
    let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
    Workload { config, model: model(), document_len: None, ranks_per_node: 2, device }
}

impl Workload {
    pub(super) fn mesh(&self) -> DeviceMesh {
        DeviceMesh::dp_sp(self.config.mesh.dp_size, self.config.mesh.sp_size).unwrap()
    }

    pub(super) fn listed(&self, rank: usize) -> Schedule {
        Schedule::on(self.device, &self.config, &self.model, &self.mesh(), rank, None).unwrap()
    }
}

#[test]
fn a_counted_step_is_the_listed_one_in_memory_bytes_calls_and_arithmetic() {
    for (label, device, config) in cases() {
        for accumulation in 1..=6 {
            let workload = workload(&config, device, accumulation);
            for rank in 0..workload.config.world_size() {
                let nodes = workload.nodes(&workload.mesh(), rank).unwrap();
                let plan = |events| RankPlan::sum(rank, events, &nodes).unwrap();
                let listed = plan(workload.listed(rank));
                let counted = plan(workload.listed(rank).counted());
                assert_eq!(counted, listed, "{label}, {accumulation} micro batches, rank {rank}");
                let [listed, counted] =
                    [workload.listed(rank), workload.listed(rank).counted()].map(RankStep::sum);
                assert_eq!(counted, listed, "{label}, {accumulation} micro batches, rank {rank}");
            }
        }
    }
}

#[test]
fn the_events_of_a_counted_step_do_not_grow_with_its_micro_batches() {
    for (label, device, config) in cases() {
        let micro_batches = |accumulation: usize| -> Vec<u64> {
            let events = workload(&config, device, accumulation).listed(0).counted().steps(2);
            let times = |event| if let Event::MicroBatches { times } = event { Some(times) } else { None };
            events.filter_map(times).collect()
        };
        let times = micro_batches(1_000_000_000);
        assert_eq!(times.iter().sum::<u64>(), 2_000_000_000, "{label}");
        // Cold, warm, alike, last; in the second step there is none that is cold.
        assert!(times.len() <= 8, "{label}: {times:?}");
        assert_eq!(micro_batches(1), [1, 1], "{label}");
    }
}

#[test]
fn a_step_that_cannot_be_counted_is_refused() {
    let (_, device, config) = cases().remove(6);
    let error = |accumulation: usize| workload(&config, device, accumulation).plan().unwrap_err();
    let micro_batch = |size: usize| {
        let mut workload = workload(&config, device, 1);
        (workload.config.micro_batch_size, workload.config.train_batch_size) = (size, 2 * size);
        workload.plan().unwrap_err()
    };
    for error in [error(1 << 57), error(1 << 46), micro_batch(1 << 46), micro_batch(1 << 56)] {
        assert!(matches!(error, EngineError::StepTooLarge { .. }), "{error}");
        assert!(error.to_string().contains("gradient_accumulation_steps"), "{error}");
    }
}
