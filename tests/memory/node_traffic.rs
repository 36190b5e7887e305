//! Bytes that ranks send within and between nodes in a real step, compared with the plan's.

use crate::support::device::{is_cpu, test_device};
use crate::support::mesh_run::{global_batch, micro_batches, on_mesh};
use crate::support::reference::Batch;
use anyhow::Result;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use ulysses::comm::thread::LaunchOptions;
use ulysses::comm::{ProcessGroupExt, TrainingGroups};
use ulysses::config::Config;
use ulysses::data::DataError;
use ulysses::device::DeviceKind;
use ulysses::engine::Engine;
use ulysses::estimate::{RankStep, SentBytes, Workload};
use ulysses::kernels::attention::FlashAttention;
use ulysses::model::{Model, ModelConfig, RandomWeights, preset};

const SEQ_LEN: usize = 25;

/// Uneven shards and heads.
fn model() -> ModelConfig {
    let sizes =
        ModelConfig { hidden_size: 40, intermediate_size: 40, vocab_size: 96, ..preset("nano").unwrap() };
    sizes.with_attention(|layer| (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (5, 5, 8))
}

fn config(mesh: &Value, stage: usize, zero_axes: &[&str]) -> Config {
    let file = json!({
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": { "stage": stage },
        "ulysses": { "mesh": mesh, "seq_len": SEQ_LEN, "zero_partition_axes": zero_axes },
    });
    Config::from_json_str(&file.to_string(), "test.json").unwrap()
}

/// Bytes that this rank has sent to each rank, once its peers have received them.
fn sent_to(groups: &TrainingGroups) -> Result<BTreeMap<usize, u64>> {
    let mut sums = BTreeMap::new();
    for (_, group) in groups.by_axis() {
        group.barrier()?;
        for (peer, bytes) in group.global_ranks().iter().zip(group.sent_to()) {
            *sums.entry(*peer).or_default() += bytes;
        }
    }
    Ok(sums)
}

/// Bytes that each rank sends to each rank in a step.
fn measured(config: &Config) -> Vec<BTreeMap<usize, u64>> {
    let batch = Batch::random(96, config.train_batch_size, SEQ_LEN, 3);
    let batch = global_batch(&batch).unwrap();
    let ranks = on_mesh(config, &LaunchOptions::default(), |_, groups| {
        let (attention, device) = (Arc::new(FlashAttention::default()), test_device());
        let weights = RandomWeights { seed: 1 };
        let model = Model::new(&model())?;
        let mut engine = Engine::with_attention(model, &weights, config, groups.clone(), attention, &device)?;
        let mut batches = micro_batches(&batch, &engine)?.into_iter();
        let before = sent_to(&groups)?;
        engine.train_batch(|| Ok::<_, DataError>(batches.next().unwrap()))?;
        let mut after = sent_to(&groups)?;
        after.iter_mut().for_each(|(peer, bytes)| *bytes -= before[peer]);
        Ok(after)
    });
    ranks.unwrap()
}

#[test]
fn bytes_within_and_between_nodes_are_those_of_the_plan() {
    for (mesh, ranks_per_node) in [
        (json!({ "intra": { "sp": 3 }, "inter": { "dp": 2 } }), 3),
        (json!({ "intra": { "dp": 2 }, "inter": { "sp": 3 } }), 2),
        (json!({ "intra": { "dp": 2 }, "inter": { "dp": 2, "sp": 2 } }), 2),
        (json!("dp=2,sp=2@3,0,2,1"), 2),
        // A ring between nodes, and shards and replicas of hybrid sharding.
        (json!("dp=1,ring=2,ulysses=2"), 2),
        (json!("dp_replicate=2,dp_shard=2,sp=2"), 4),
    ] {
        for (stage, zero_axes) in [(1, &["dp"][..]), (3, &["dp"]), (3, &["dp", "sp"])] {
            let config = config(&mesh, stage, zero_axes);
            let placed = config.placed_mesh(None).unwrap().mesh;
            let device = if is_cpu() { DeviceKind::Cpu } else { DeviceKind::Cuda };
            let workload = Workload {
                config: config.clone(),
                model: model(),
                document_len: None,
                ranks_per_node,
                device,
            };
            for (rank, sent) in measured(&config).into_iter().enumerate() {
                let label = format!("{mesh}, stage {stage} over {zero_axes:?}, rank {rank}");
                let planned = RankStep::of(&config, &model(), &placed, rank).unwrap().sent_to;
                assert_eq!(sent, planned, "{label}");
                let is_within = |peer: &usize| peer / ranks_per_node == rank / ranks_per_node;
                let within: u64 =
                    sent.iter().filter(|(peer, _)| is_within(peer)).map(|(_, bytes)| bytes).sum();
                let between = sent.values().sum::<u64>() - within;
                let expected = SentBytes { intra_node_bytes: within, inter_node_bytes: between };
                assert_eq!(workload.plan_of(rank).unwrap().sent, expected, "{label}");
                assert!(between > 0, "{label}: some group spans nodes");
            }
        }
    }
}
