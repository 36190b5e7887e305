//! [`RankStep`]: the planned compute and communication of one step, to compare with the real ones.

use super::event::{Axis, Event, Pass, Purpose};
use super::{RankClass, Workload};
use crate::comm::CollectiveOp;
use crate::config::Config;
use crate::engine::EngineError;
use crate::mesh::DeviceMesh;
use crate::model::ModelConfig;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use ulysses_kernels::device::DeviceKind;
use ulysses_kernels::device::dry::MatmulOp;

/// The FLOPs and collectives of one rank's step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankStep {
    /// FLOPs by op and pass.
    pub flops: BTreeMap<(MatmulOp, Pass), f64>,
    /// Collectives, with equal ones counted.
    pub collectives: Vec<PlannedCalls>,
    /// Bytes sent to each rank, by its global rank; empty if the mesh is not known.
    pub sent_to: BTreeMap<usize, u64>,
}

/// Equal collectives of one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlannedCalls {
    /// The axis of the mesh.
    pub axis: String,
    /// The operation.
    pub op: CollectiveOp,
    /// The purpose.
    pub purpose: String,
    /// Input bytes of the rank per call.
    pub input_bytes: u64,
    /// Number of calls.
    pub calls: u64,
    /// Bytes that the rank sends in all calls.
    pub sent_bytes: u64,
}

impl RankStep {
    /// Plans the step of a rank.
    ///
    /// # Errors
    /// As [`Workload::plan`].
    pub fn of(
        config: &Config,
        model: &ModelConfig,
        mesh: &DeviceMesh,
        rank: usize,
    ) -> Result<Self, EngineError> {
        let workload = workload(config, model);
        let step = workload.first_step(mesh, rank)?;
        Self::on_mesh(&workload, mesh, rank, step.events())
    }

    /// Plans the evaluation of a micro batch: its forward pass, and the sums of its loss.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_evaluation(
        config: &Config,
        model: &ModelConfig,
        mesh: &DeviceMesh,
        rank: usize,
    ) -> Result<Self, EngineError> {
        let workload = workload(config, model);
        let events = workload.evaluation(mesh, rank)?;
        Self::on_mesh(&workload, mesh, rank, events.iter().map(|event| (1, event)))
    }

    /// Sums the events of a rank of a mesh.
    fn on_mesh<'a>(
        workload: &Workload,
        mesh: &DeviceMesh,
        rank: usize,
        events: impl Iterator<Item = (u64, &'a Event)> + Clone,
    ) -> Result<Self, EngineError> {
        let (nodes, mut sent_to) = (workload.nodes(mesh, rank)?, BTreeMap::new());
        let transfers = events.clone().filter_map(|(times, event)| match event {
            Event::Collective(transfer) => Some((times, transfer)),
            _ => None,
        });
        let added: Option<()> =
            transfers.map(|(times, transfer)| nodes.add_sent_to(&mut sent_to, transfer, times)).collect();
        let summed = added.and_then(|()| Some(Self { sent_to, ..Self::sum(events)? }));
        summed.ok_or_else(|| EngineError::step_too_large(&workload.config))
    }

    /// Sums events; `None` if the bytes overflow.
    pub(super) fn sum<'a>(events: impl IntoIterator<Item = (u64, &'a Event)>) -> Option<Self> {
        let mut flops = BTreeMap::new();
        let mut counts: BTreeMap<(Axis, CollectiveOp, Purpose, u64), (u64, u64)> = BTreeMap::new();
        for (times, event) in events {
            match event {
                Event::Compute(work) => {
                    *flops.entry((work.op, work.pass)).or_default() += times as f64 * work.flops;
                }
                Event::Collective(transfer) => {
                    let kind = (transfer.axis, transfer.op, transfer.purpose, transfer.input_bytes);
                    let (calls, sent_bytes) = counts.entry(kind).or_default();
                    *calls = times.checked_add(*calls)?;
                    *sent_bytes = transfer.sent_bytes().checked_mul(times)?.checked_add(*sent_bytes)?;
                }
                Event::Wait { .. }
                | Event::Elementwise { .. }
                | Event::File { .. }
                | Event::HostCopy { .. } => {}
            }
        }
        let planned = |((axis, op, purpose, input_bytes), (calls, sent_bytes)): (_, _)| {
            let (axis, purpose) = (Axis::name(axis).to_owned(), Purpose::to_string(&purpose));
            PlannedCalls { axis, op, purpose, input_bytes, calls, sent_bytes }
        };
        let collectives = counts.into_iter().map(planned).collect();
        Some(Self { flops, collectives, sent_to: BTreeMap::new() })
    }

    /// Returns the FLOPs of forward and backward passes, without recomputation.
    pub fn model_flops(&self) -> ModelFlops {
        let mut model = ModelFlops::default();
        for ((op, pass), flops) in &self.flops {
            match (op, pass) {
                (_, Pass::Recompute) => {}
                (MatmulOp::LmHead, _) => model.lm_head += flops,
                (MatmulOp::Linear | MatmulOp::Attention, _) => model.layers += flops,
            }
        }
        model
    }
}

/// FLOPs of a step without recomputation, if every token has a label.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ModelFlops {
    /// FLOPs of the layers.
    pub layers: f64,
    /// FLOPs of the LM head, which computes only tokens with a label.
    pub lm_head: f64,
}

impl ModelFlops {
    /// Returns the FLOPs if a share of the tokens, from 0 to 1, has a label.
    pub fn with_labels(self, share: f64) -> f64 {
        self.layers + self.lm_head * share
    }
}

/// Returns the workload on a CPU and one node: compute and communication do not depend on device and nodes.
fn workload(config: &Config, model: &ModelConfig) -> Workload {
    let (config, model) = (config.clone(), model.clone());
    Workload { config, model, document_len: None, ranks_per_node: 1, device: DeviceKind::Cpu }
}

/// Returns the FLOPs of a step on all ranks.
///
/// # Errors
/// As [`Workload::plan`].
pub fn model_flops(
    config: &Config,
    model: &ModelConfig,
    mesh: &DeviceMesh,
) -> Result<ModelFlops, EngineError> {
    let mut total = ModelFlops::default();
    for RankClass { rank, ranks, .. } in workload(config, model).rank_classes()? {
        // Ranks of different dp coordinates do the same.
        let ranks = (ranks * config.mesh.dp_size) as f64;
        let rank = mesh.ranks()[rank];
        let ModelFlops { layers, lm_head } = RankStep::of(config, model, mesh, rank)?.model_flops();
        total =
            ModelFlops { layers: total.layers + ranks * layers, lm_head: total.lm_head + ranks * lm_head };
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::preset;
    use serde_json::json;

    #[test]
    fn the_flops_of_a_step_do_not_depend_on_the_mesh_that_computes_it() {
        let of_mesh = |pp: usize, dp: usize, sp: usize, tp: usize| {
            let json = json!({
                "train_batch_size": 4, "mesh_param": [dp, sp], "tensor_parallel_size": tp, "pipeline_parallel_size": pp,
                "ulysses": { "seq_len": 64 },
            });
            let config = Config::from_json_str(&json.to_string(), "c.json").unwrap();
            let mesh = config.mesh.shape().row_major().unwrap();
            model_flops(&config, &preset("nano").unwrap(), &mesh).unwrap().with_labels(1.0)
        };
        let alone = of_mesh(1, 1, 1, 1);
        assert!(alone > 0.0);
        for (pp, dp, sp, tp) in
            [(1, 2, 1, 1), (1, 1, 2, 1), (1, 2, 2, 1), (1, 1, 1, 2), (1, 1, 2, 2), (2, 1, 1, 1), (2, 2, 2, 2)]
        {
            let error = (of_mesh(pp, dp, sp, tp) - alone).abs() / alone;
            assert!(error < 1e-12, "pp {pp} × dp {dp} × sp {sp} × tp {tp}: {error}");
        }
    }

    #[test]
    fn the_flops_of_a_step_are_those_of_every_matmul_of_the_model() {
        let json = r#"{ "train_batch_size": 1, "ulysses": { "seq_len": 9 } }"#;
        let config = Config::from_json_str(json, "c.json").unwrap();
        let flops =
            model_flops(&config, &preset("nano").unwrap(), &DeviceMesh::dp_sp(1, 1).unwrap()).unwrap();
        // Forward and backward: 6 per weight of a matmul, 12 per visible pair and head element.
        // q, k, v, o: 64·(64 + 32 + 32 + 64); gate, up, down: 3·64·172; two layers; head: 64·256.
        let (layers, head) = (2 * (64 * 192 + 3 * 64 * 172), 64 * 256);
        // 4 heads of 16 attend to 1 … 9 tokens, 5 on average.
        let attention = 2 * 12 * 64 * 5;
        assert_eq!(flops.with_labels(1.0), (9 * (6 * (layers + head) + attention)) as f64);
        let three_labels = 9 * (6 * layers + attention) + 3 * 6 * head;
        assert!((flops.with_labels(3.0 / 9.0) / three_labels as f64 - 1.0).abs() < 1e-12, "{flops:?}");
    }

    #[test]
    fn the_flops_of_the_measured_model_are_those_of_the_literature() {
        // 4 layers, 256 wide, 8 heads, 2048 tokens: 31.9 MFLOP per token, forward and backward.
        let model = preset("small").unwrap();
        let with = |sp: usize, documents: Option<usize>, recompute: bool, saves_output: bool| -> f64 {
            let config = json!({
                "train_batch_size": 1, "mesh_param": [1, sp],
                "ulysses": {
                    "seq_len": 2048, "activation_checkpointing": recompute, "save_attention_output": saves_output,
                },
            });
            let config = Config::from_json_str(&config.to_string(), "test.json").unwrap();
            let workload = Workload { document_len: documents, ..workload(&config, &model) };
            let work = |event| if let Event::Compute(work) = event { Some(work.flops) } else { None };
            let of_rank = |rank| workload.events(rank).unwrap().into_iter().filter_map(work);
            (0..sp).flat_map(of_rank).sum::<f64>() / 2048.0
        };
        let flops = |sp, documents, recompute| with(sp, documents, recompute, false);
        let whole = flops(1, None, false);
        assert!((whole / 1e6 - 31.95).abs() < 0.05, "{whole}");
        for sp in [2, 3, 4, 8] {
            assert!(
                (flops(sp, None, false) / whole - 1.0).abs() < 1e-9,
                "sp {sp} changes who computes, not what"
            );
        }
        assert!(flops(1, Some(256), false) < 0.75 * whole, "documents see themselves only");
        let recomputed = flops(1, None, true) / whole;
        // A forward more, but for the head and the matmul of the layer's output, which is not needed.
        assert!((1.28..1.29).contains(&recomputed), "{recomputed}");
        // 4 FLOPs per visible pair and head element: 4 layers, 256 wide, 1024.5 tokens on average.
        let attention = 4.0 * 4.0 * 256.0 * 1024.5;
        for sp in [1, 3] {
            let spared = flops(sp, None, true) - with(sp, None, true, true);
            assert!((spared / attention - 1.0).abs() < 1e-9, "sp {sp}: {spared}");
        }
    }
}
