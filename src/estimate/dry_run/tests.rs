//! Dry steps, by the engine.

mod mistakes;

use super::*;
use crate::comm::CollectiveOp;
use crate::estimate::event::Purpose;
use crate::estimate::tests::workload;
use crate::placement::{Layout, LayoutAxis, Placement, StepKind, redistribute};
use crate::zero::{Buffer, Division, ZeroAxis};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use ulysses_kernels::device::DeviceKind;

#[test]
fn checkpoints_of_an_earlier_length_are_not_offloaded_any_more() {
    let config = json!({
        "activation_checkpointing": { "cpu_checkpointing": true },
        "ulysses": { "activation_checkpointing": true },
    });
    for device in [DeviceKind::Cuda, DeviceKind::Cpu] {
        let workload = workload(&config, device, 1);
        let mesh = workload.mesh().unwrap();
        let most = |lengths: &[usize], frees: bool| {
            let steps = |rank: &mut DryRank, accumulation| {
                let mut last = 0;
                for length in lengths {
                    let mut workload = workload.clone();
                    workload.config.ulysses.seq_len = Some(*length);
                    rank.batch = workload.batch(0)?;
                    last = rank.step(accumulation)?.offloaded_bytes;
                    if frees {
                        rank.engine.free_recycled_storage()?;
                    }
                }
                Ok(last)
            };
            workload.dry(&mesh, 0, MAX_MICRO_BATCHES, steps).unwrap()
        };
        let longest = most(&[26], false);
        assert!(longest > 0);
        assert_eq!(most(&[20, 24, 26], true), longest, "{device:?}");
        assert!(most(&[20, 24, 26], false) > 2 * longest, "{device:?}: storage is recycled by size");
    }
}

/// A mesh, and what divides its axes.
#[derive(Debug, Clone, Copy)]
struct Shape {
    mesh: [usize; 2],
    /// Tensor-parallel ranks.
    tp: usize,
    /// Pipeline stages.
    pp: usize,
    /// Size of the ring within sp.
    ring_size: usize,
    /// Size of the shards along dp; -1 for all of dp.
    shard_size: i64,
    /// Whether partitions span sp.
    spans_sp: bool,
}

fn shapes() -> Vec<Shape> {
    let of =
        |mesh, ring_size, shard_size, spans_sp| Shape { mesh, tp: 1, pp: 1, ring_size, shard_size, spans_sp };
    let with_tp = |mesh, tp, ring_size| Shape { tp, ..of(mesh, ring_size, -1, false) };
    let with_pp = |mesh, tp, pp| Shape { pp, ..with_tp(mesh, tp, 1) };
    vec![
        of([1, 1], 1, -1, false),
        of([2, 1], 1, -1, false),
        of([1, 3], 1, -1, false),
        of([2, 2], 1, -1, false),
        of([2, 2], 1, -1, true),
        of([2, 4], 2, -1, false),
        of([2, 4], 2, -1, true),
        of([1, 4], 4, -1, false),
        of([4, 2], 1, 2, false),
        of([4, 2], 1, 2, true),
        of([4, 4], 2, 2, false),
        of([4, 4], 2, 2, true),
        of([2, 2], 1, 1, false),
        with_tp([1, 1], 2, 1),
        with_tp([1, 1], 4, 1),
        with_tp([2, 2], 2, 1),
        with_tp([2, 2], 2, 2),
        with_pp([1, 1], 1, 2),
        with_pp([2, 1], 1, 3),
        with_pp([2, 2], 2, 2),
        with_pp([1, 2], 2, 3),
    ]
}

/// Settings that change how gradients are accumulated, sent, kept and used.
fn variants() -> Vec<Value> {
    let frozen = json!([{ "match": "embed_tokens", "frozen": true }, { "match": "mlp", "frozen": true }]);
    let in_bf16 =
        json!({ "communication_data_type": "bf16", "seq_parallel_communication_data_type": "bf16" });
    vec![
        json!({}),
        in_bf16,
        json!({ "bf16": { "enabled": true } }),
        json!({ "optimizer": { "type": "Lamb" } }),
        json!({ "ulysses": { "parameter_groups": frozen } }),
        json!({ "zero_optimization": { "offload_optimizer": { "device": "nvme" } } }),
        json!({ "zero_optimization": { "offload_optimizer": { "device": "nvme" }, "offload_param": { "device": "nvme" } } }),
    ]
}

/// The config of a stage on a shape, with a variant.
fn config(shape: &Shape, variant: &Value, stage: u8) -> Value {
    let mut config = variant.clone();
    config["mesh_param"] = json!(shape.mesh);
    config["tensor_parallel_size"] = json!(shape.tp);
    config["pipeline_parallel_size"] = json!(shape.pp);
    config["zero_optimization"]["stage"] = json!(stage);
    config["zero_optimization"]["mics_shard_size"] = json!(shape.shard_size);
    config["ulysses"]["ring_size"] = json!(shape.ring_size);
    if shape.spans_sp {
        config["ulysses"]["zero_partition_axes"] = json!(["dp", "sp"]);
    }
    config
}

fn supports(variant: &Value, stage: u8) -> bool {
    let has = |key: &str| variant.pointer(&format!("/zero_optimization/{key}")).is_some();
    (stage >= 1 || !has("offload_optimizer")) && (stage == 3 || !has("offload_param"))
}

/// Runs two steps and a comparison of the replicas on the last rank of each stage, and describes a run that fails.
fn check_ledger(
    shape: &Shape,
    variant: &Value,
    (stage, tied, accumulation): (u8, bool, usize),
) -> Result<(), String> {
    let mut workload = workload(&config(shape, variant, stage), DeviceKind::Cpu, accumulation);
    workload.model.tie_word_embeddings = tied;
    let mesh = workload.mesh().unwrap();
    let ranks_per_stage = mesh.world_size() / shape.pp;
    let mut ranks = (1..=shape.pp).map(|stages| stages * ranks_per_stage - 1);
    let outcome = ranks.try_for_each(|rank| workload.warm_step(&mesh, rank).map(drop));
    let run = format!("stage {stage}, tied {tied}, {accumulation} micro steps, {shape:?}, {variant}");
    outcome.map_err(|error| format!("{run}: {error}"))
}

#[test]
fn gradients_are_summed_and_counted_once_at_every_stage_on_every_mesh() {
    let mut faults = Vec::new();
    let mut runs = 0;
    for (shape, variant) in shapes().iter().flat_map(|shape| variants().into_iter().map(move |v| (shape, v)))
    {
        for stage in (0..4).filter(|stage| supports(&variant, *stage)) {
            for (tied, accumulation) in [(false, 1), (true, 1), (false, 3), (true, 3)] {
                faults.extend(check_ledger(shape, &variant, (stage, tied, accumulation)).err());
                runs += 1;
            }
        }
    }
    assert!(faults.is_empty(), "{} of {runs} runs fail; the first:\n{}", faults.len(), faults[0]);
    assert!(runs > 1000, "{runs}");
}

/// The collectives by axis, with the bytes that the rank sends, in no order.
type Reductions = BTreeMap<(String, CollectiveOp, u64), usize>;

#[test]
fn zero_reduces_a_gradient_by_the_steps_from_its_layout_to_that_of_the_state() {
    // Parameters that tp divides have another layout than the others.
    let shapes: Vec<_> = shapes().into_iter().filter(|shape| shape.tp * shape.pp == 1).collect();
    for (shape, stage) in shapes.iter().flat_map(|shape| (0..4).map(move |stage| (shape, stage))) {
        let workload = workload(&config(shape, &json!({}), stage), DeviceKind::Cpu, 1);
        let mesh = workload.mesh().unwrap();
        let (mut planned, mut run) = (Reductions::new(), Reductions::new());
        let step = |rank: &mut DryRank, accumulation| {
            let (zero, groups) = (rank.engine.zero(), rank.engine.groups());
            let layout = groups.layout(Buffer::OptimizerState, zero.stage(), Division::default());
            let axes = layout.axes();
            let coordinate: Vec<usize> = axes.iter().map(|axis| axis.group.rank()).collect();
            for unit in zero.layouts() {
                let layout = |placement: fn(&ZeroAxis<'_>) -> Placement| {
                    let axis = |axis: &ZeroAxis<'_>| {
                        LayoutAxis::new(axis.name, axis.group.world_size(), placement(axis))
                    };
                    Layout::new([unit.padded_numel()], axes.iter().map(axis)).unwrap()
                };
                let plan =
                    redistribute(&layout(|_| Placement::Partial), &layout(|axis| axis.placement)).unwrap();
                for step in plan.steps().iter().filter(|step| step.before.axes()[step.axis].size > 1) {
                    let op = match step.kind {
                        StepKind::ReduceScatter { .. } => CollectiveOp::ReduceScatter,
                        StepKind::AllReduce => CollectiveOp::AllReduce,
                        kind => panic!("{kind:?}"),
                    };
                    let bytes = step.sent_elems(&coordinate).unwrap() * size_of::<f32>() as u64;
                    *planned.entry((axes[step.axis].name.to_owned(), op, bytes)).or_default() += 1;
                }
            }
            rank.step(accumulation)
        };
        let step = workload.dry(&mesh, 0, MAX_MICRO_BATCHES, step).unwrap();
        for (_, event) in step.events() {
            if let Event::Collective(transfer) = event
                && transfer.purpose == Purpose::ReduceGradients
            {
                let key = (transfer.axis.name().to_owned(), transfer.op, transfer.sent_bytes());
                *run.entry(key).or_default() += 1;
            }
        }
        assert_eq!(run, planned, "stage {stage}, {shape:?}");
        assert_eq!(run.is_empty(), mesh.world_size() == 1);
    }
}
