//! What a rank computes and communicates in one step, to stand beside what it really did.

use crate::comm::CollectiveOp;
use crate::config::Config;
use crate::engine::EngineError;
use crate::engine::schedule::{Axis, Event, Moment, Pass, Piece, Purpose, Transfer, schedule};
use crate::mesh::DeviceMesh;
use crate::model::LlamaConfig;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One rank's arithmetic and collectives of a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankStep {
    /// Floating-point operations.
    pub flops: BTreeMap<(Piece, Pass), f64>,
    /// Collectives that are alike, counted.
    pub collectives: Vec<PlannedCalls>,
}

/// Collectives of one step that are alike.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlannedCalls {
    /// The axis of the mesh.
    pub axis: String,
    /// The operation.
    pub op: CollectiveOp,
    /// What for, in words.
    pub purpose: String,
    /// Bytes that the rank puts into each.
    pub input_bytes: u64,
    /// How often.
    pub calls: u64,
    /// Bytes that the rank sends in all of them.
    pub sent_bytes: u64,
}

impl RankStep {
    /// Of a rank of the mesh.
    ///
    /// # Errors
    /// As [`schedule`].
    pub fn of(
        config: &Config,
        model: &LlamaConfig,
        mesh: &DeviceMesh,
        rank: usize,
    ) -> Result<Self, EngineError> {
        let events = schedule(config, model, mesh, rank)?.counted();
        Self::sum(events).ok_or_else(|| EngineError::step_too_large(config))
    }

    /// Of a micro batch that is only evaluated: its forward pass, and the sums of its loss. Its arithmetic is without the head.
    ///
    /// # Errors
    /// As [`schedule`].
    pub fn of_evaluation(
        config: &Config,
        model: &LlamaConfig,
        mesh: &DeviceMesh,
        rank: usize,
    ) -> Result<Self, EngineError> {
        let config = Config {
            gradient_accumulation_steps: 1,
            train_batch_size: config.micro_batch_size * config.mesh.dp_size,
            ..config.clone()
        };
        let mut now = Moment::Embedding;
        // The head's parameters are on their way before it begins. An update starts as an evaluation ends: it compares
        // sequences and adds up losses.
        let is_evaluated = move |event: &Event| {
            if let Event::Begin(moment) = event {
                now = *moment;
            }
            match (now, event) {
                (Moment::Embedding | Moment::Forward { .. }, _) => true,
                (Moment::Update, Event::Collective(Transfer { op, axis, purpose, .. })) => {
                    let sums = matches!(
                        (op, axis),
                        (CollectiveOp::AllGather, Axis::Sp) | (CollectiveOp::AllReduce, _)
                    );
                    *purpose == Purpose::Agree && sums
                }
                _ => false,
            }
        };
        let events = schedule(&config, model, mesh, rank)?.filter(is_evaluated);
        Self::sum(events).ok_or_else(|| EngineError::step_too_large(&config))
    }

    /// Nothing where 64 bits do not suffice for its bytes.
    pub(super) fn sum(events: impl IntoIterator<Item = Event>) -> Option<Self> {
        let mut times = 1;
        let mut flops = BTreeMap::new();
        let mut alike: BTreeMap<(Axis, CollectiveOp, Purpose, u64), (u64, u64)> = BTreeMap::new();
        for event in events {
            match event {
                Event::MicroBatches { times: alike } => times = alike,
                Event::Begin(Moment::Update) => times = 1,
                Event::Compute(work) => {
                    *flops.entry((work.piece, work.pass)).or_default() += times as f64 * work.flops;
                }
                Event::Collective(transfer) => {
                    let kind = (transfer.axis, transfer.op, transfer.purpose, transfer.input_bytes);
                    let (calls, sent_bytes) = alike.entry(kind).or_default();
                    *calls = times.checked_add(*calls)?;
                    *sent_bytes = transfer.sent_bytes().checked_mul(times)?.checked_add(*sent_bytes)?;
                }
                Event::Begin(_) | Event::Memory { .. } | Event::Offloaded { .. } => {}
                Event::Wait(_) | Event::Sweep { .. } | Event::File { .. } | Event::HostCopy { .. } => {}
            }
        }
        let planned = |((axis, op, purpose, input_bytes), (calls, sent_bytes)): (_, _)| {
            let (axis, purpose) = (Axis::name(axis).to_owned(), Purpose::to_string(&purpose));
            PlannedCalls { axis, op, purpose, input_bytes, calls, sent_bytes }
        };
        Some(Self { flops, collectives: alike.into_iter().map(planned).collect() })
    }

    /// Operations of forward and backward; what is computed twice counts once.
    pub fn model_flops(&self) -> f64 {
        self.flops.iter().filter(|((_, pass), _)| *pass != Pass::Recompute).map(|(_, flops)| flops).sum()
    }
}

/// Floating-point operations of a step on all ranks together, without those of recomputation.
///
/// # Errors
/// As [`schedule`].
pub fn model_flops(config: &Config, model: &LlamaConfig, mesh: &DeviceMesh) -> Result<f64, EngineError> {
    // Ranks of different dp coordinates do the same.
    let of_rank = |rank| Ok::<_, EngineError>(RankStep::of(config, model, mesh, rank)?.model_flops());
    let of_group = mesh.group_of("sp", 0)?.into_iter().map(of_rank).sum::<Result<f64, _>>()?;
    Ok(of_group * config.mesh.dp_size as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::preset;

    #[test]
    fn the_flops_of_a_step_do_not_depend_on_the_mesh_that_computes_it() {
        let of_mesh = |dp: usize, sp: usize| {
            let json = format!(
                r#"{{ "train_batch_size": 4, "mesh_param": [{dp}, {sp}], "ulysses": {{ "seq_len": 64 }} }}"#
            );
            let config = Config::from_json_str(&json, "c.json").unwrap();
            model_flops(&config, &preset("nano").unwrap(), &DeviceMesh::dp_sp(dp, sp).unwrap()).unwrap()
        };
        let alone = of_mesh(1, 1);
        assert!(alone > 0.0);
        for (dp, sp) in [(2, 1), (1, 2), (2, 2)] {
            let error = (of_mesh(dp, sp) - alone).abs() / alone;
            assert!(error < 1e-12, "dp {dp} × sp {sp}: {error}");
        }
    }

    #[test]
    fn the_flops_of_a_step_are_those_of_every_product_of_the_model() {
        let json = r#"{ "train_batch_size": 1, "ulysses": { "seq_len": 9 } }"#;
        let config = Config::from_json_str(json, "c.json").unwrap();
        let flops =
            model_flops(&config, &preset("nano").unwrap(), &DeviceMesh::dp_sp(1, 1).unwrap()).unwrap();
        // Forward and backward: 6 for every weight of a product, 12 for every element of an attended pair of a head.
        // q, k, v, o: 64·(64 + 32 + 32 + 64); gate, up, down: 3·64·172; two layers; head: 64·256.
        let weights = 2 * (64 * 192 + 3 * 64 * 172) + 64 * 256;
        // 4 heads of 16 attend to 1 … 9 tokens, 5 on average.
        let attention = 2 * 12 * 64 * 5;
        assert_eq!(flops, (9 * (6 * weights + attention)) as f64);
    }
}
