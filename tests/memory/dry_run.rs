//! The communication of a dry run against that of real ranks in a step: every collective in order, with its
//! bytes.

mod hybrid_attention;
mod pipeline;

use crate::support::device::{is_cpu, test_device};
use crate::support::mesh_run::{global_batch, micro_batches, on_mesh};
use crate::support::recorded::{Log, Recorded, Started};
use crate::support::reference::Batch;
use crate::support::sample::{axes, sampled};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use ulysses::comm::thread::LaunchOptions;
use ulysses::comm::{CollectiveOp, ProcessGroupExt, TrainingGroups};
use ulysses::config::Config;
use ulysses::data::DataError;
use ulysses::device::DeviceKind;
use ulysses::engine::Engine;
use ulysses::estimate::Workload;
use ulysses::estimate::event::{Axis, Event, Purpose, Transfer};
use ulysses::kernels::attention::FlashAttention;
use ulysses::memory::{live_by_category, live_bytes};
use ulysses::mesh::{DeviceMesh, ShardShape};
use ulysses::model::{Model, ModelConfig, RandomWeights, family, preset, shape};

/// Bytes sent and received, by axis and operation.
type Moved = BTreeMap<(&'static str, CollectiveOp), (u64, u64)>;

/// A model, a mesh and further config.
struct Case {
    label: &'static str,
    model: ModelConfig,
    mesh: (usize, usize),
    seq_len: usize,
    config: Value,
}

fn tiny(num_heads: usize, num_kv_heads: usize) -> ModelConfig {
    let nano = preset("nano").unwrap().with_num_layers(3).with_attention(|layer| {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (num_heads, num_kv_heads, 8);
    });
    ModelConfig { hidden_size: 8 * num_heads, intermediate_size: 40, vocab_size: 96, ..nano }
}

fn tied(model: ModelConfig) -> ModelConfig {
    ModelConfig { tie_word_embeddings: true, ..model }
}

fn case(
    label: &'static str,
    model: ModelConfig,
    mesh: (usize, usize),
    seq_len: usize,
    config: Value,
) -> Case {
    Case { label, model, mesh, seq_len, config }
}

/// Keys of a config that are axes of the test matrix.
const AXES: [&str; 21] = [
    "/pipeline_parallel_size",
    "/ulysses/pipeline/schedule",
    "/ulysses/pipeline/virtual_stages",
    "/bf16/enabled",
    "/fp16/enabled",
    "/gradient_accumulation_steps",
    "/communication_data_type",
    "/optimizer/type",
    "/activation_checkpointing/cpu_checkpointing",
    "/zero_optimization/stage",
    "/zero_optimization/mics_shard_size",
    "/zero_optimization/offload_optimizer/device",
    "/zero_optimization/offload_param/device",
    "/ulysses/activation_checkpointing",
    "/ulysses/activation_checkpointing_interval",
    "/ulysses/save_attention_output",
    "/ulysses/head_chunks",
    "/ulysses/overlap_exchange",
    "/ulysses/parameter_groups/0/frozen",
    "/ulysses/ring_size",
    "/ulysses/zero_partition_axes",
];

/// Values of a mesh and a config on the axes of a test matrix.
pub(crate) fn axes((dp, sp): (usize, usize), config: &Value) -> Vec<String> {
    let value = |axis: &str| format!("{axis} {}", config.pointer(axis).unwrap_or(&Value::Null));
    [axes![dp, sp], AXES.map(value).to_vec()].concat()
}

/// Every stage, with sequences and heads that do not divide evenly, accumulation, recomputation, 16 bits.
fn cases() -> Vec<Case> {
    let stage = |stage: usize| json!({ "zero_optimization": { "stage": stage } });
    let with = |stage: usize, extra: Value| {
        let mut config = json!({ "zero_optimization": { "stage": stage } });
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        config
    };
    let recompute = json!({ "ulysses": { "activation_checkpointing": true } });
    let twice = json!({ "gradient_accumulation_steps": 2 });
    let mean = json!({
        "loss_normalization": "micro_batch", "ulysses": { "activation_checkpointing": true },
    });
    vec![
        case("alone", tiny(4, 2), (1, 1), 24, stage(0)),
        case("sp 2", tiny(8, 8), (1, 2), 24, stage(0)),
        case("sp 2, tied, stage 3 of one", tied(tiny(8, 4)), (1, 2), 25, stage(3)),
        case("dp 2, stage 1", tiny(4, 2), (2, 1), 24, stage(1)),
        case("dp 2, stage 3, tied", tied(tiny(4, 2)), (2, 1), 24, with(3, recompute.clone())),
        case("sp 3, uneven", tiny(8, 4), (1, 3), 25, with(2, recompute.clone())),
        case("dp 3, stage 2, twice", tiny(8, 2), (3, 1), 16, with(2, twice.clone())),
        case("dp 3, LAMB", tiny(8, 2), (3, 1), 16, with(1, json!({ "optimizer": { "type": "Lamb" } }))),
        case("2 x 2, stage 0, twice", tiny(8, 4), (2, 2), 22, with(0, twice.clone())),
        case("2 x 2, stage 1, bf16", tiny(8, 1), (2, 2), 23, with(1, json!({ "bf16": { "enabled": true } }))),
        case("2 x 2, stage 3, means", tiny(6, 3), (2, 2), 22, with(3, mean)),
        case("2 x 3, stage 3", tiny(8, 4), (2, 3), 26, with(3, twice.clone())),
        case("3 x 2, stage 2", tied(tiny(8, 4)), (3, 2), 21, with(2, recompute.clone())),
        case("1 x 6, GQA beyond its KV heads", tiny(8, 2), (1, 6), 26, stage(1)),
        case("2 x 4, stage 3", tiny(8, 2), (2, 4), 30, with(3, recompute)),
        case("4 x 2, stage 1", tiny(8, 8), (4, 2), 18, with(1, twice)),
        case("3 x 3, stage 3", tiny(8, 4), (3, 3), 16, with(3, json!({}))),
        case("3 x 2, stage 3, uneven", tiny(7, 7), (3, 2), 23, stage(3)),
        case("2 x 3, stage 1, GQA", tiny(6, 2), (2, 3), 25, stage(1)),
        case("1 x 8", tiny(8, 2), (1, 8), 37, stage(0)),
        case("8 x 1, stage 2", tied(tiny(4, 4)), (8, 1), 12, stage(2)),
    ]
    .into_iter()
    .chain(memory_cases())
    .chain(hybrid_cases())
    .chain(cases_over_sp())
    .chain(cases_in_bf16())
    .chain(ring_cases())
    .chain(pipeline::cases())
    .chain(hybrid_attention::cases())
    .collect()
}

/// Replicas of ZeRO's partitions along dp.
fn hybrid_cases() -> Vec<Case> {
    let of = |stage: usize, shard_size: usize, extra: Value| {
        let mut config = json!({ "zero_optimization": { "stage": stage, "mics_shard_size": shard_size } });
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        config
    };
    let (once, twice) = (json!({}), json!({ "gradient_accumulation_steps": 2 }));
    let lamb = json!({ "optimizer": { "type": "Lamb" } });
    vec![
        case("4 x 2, 2 replicas, stage 3", tiny(8, 4), (4, 2), 22, of(3, 2, twice.clone())),
        case("4 x 1, 2 replicas, stage 2", tiny(4, 2), (4, 1), 16, of(2, 2, twice)),
        case("6 x 1, 2 replicas, LAMB", tied(tiny(4, 2)), (6, 1), 16, of(1, 3, lamb)),
        case("2 x 3, 2 replicas, stage 0", tiny(6, 3), (2, 3), 22, of(0, 1, once.clone())),
        case("2 x 2, 2 replicas of the whole", tiny(6, 3), (2, 2), 22, of(3, 1, once.clone())),
        case("3 x 3, stage 3", tiny(6, 3), (3, 3), 25, of(3, 3, once)),
    ]
}

/// Rings, alone and of Ulysses groups; the last ones with blocks that do not travel all the way.
fn ring_cases() -> Vec<Case> {
    let of = |ring_size: usize, stage: usize, ulysses: Value| {
        let mut config = json!({ "zero_optimization": { "stage": stage }, "ulysses": ulysses });
        config["ulysses"]["ring_size"] = json!(ring_size);
        config
    };
    let recompute = |saves: bool| json!({ "activation_checkpointing": true, "save_attention_output": saves });
    let chunks = json!({ "head_chunks": 2, "overlap_exchange": true });
    let mistral = ModelConfig { family: family("mistral").unwrap(), ..tiny(8, 4) };
    let windowed = mistral.with_attention(|layer| layer.window = Some(4));
    vec![
        case("ring 2", tiny(8, 4), (1, 2), 24, of(2, 0, json!({}))),
        case("ring 3, two heads, uneven", tiny(2, 1), (1, 3), 25, of(3, 0, recompute(true))),
        case("2 x ring 2, stage 3", tiny(8, 4), (2, 2), 23, of(2, 3, recompute(false))),
        case("2 x ring 2 x ulysses 2", tiny(8, 4), (2, 4), 26, of(2, 1, json!({}))),
        case("ring 2 x ulysses 3, chunks", tiny(8, 2), (1, 6), 40, of(2, 0, chunks)),
        case("ring 4, a window", windowed, (1, 4), 64, of(4, 0, json!({}))),
    ]
}

/// Partitions over sp, alone and with dp.
fn cases_over_sp() -> Vec<Case> {
    let of = |stage: usize, shard_size: i64, extra: Value| {
        let mut config = json!({
            "zero_optimization": { "stage": stage, "mics_shard_size": shard_size },
            "ulysses": { "zero_partition_axes": ["dp", "sp"] },
        });
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        config
    };
    let (once, twice) = (json!({}), json!({ "gradient_accumulation_steps": 2 }));
    let lamb = json!({ "optimizer": { "type": "Lamb" } });
    vec![
        case("1 x 3, stage 3 over sp", tiny(6, 3), (1, 3), 22, of(3, -1, once.clone())),
        case("1 x 4, stage 1 over sp", tied(tiny(4, 2)), (1, 4), 21, of(1, -1, lamb)),
        case("2 x 2, stage 2 over sp", tiny(4, 2), (2, 2), 16, of(2, -1, twice.clone())),
        case("4 x 2, 2 replicas, stage 3 over sp", tiny(8, 4), (4, 2), 22, of(3, 2, twice)),
        case("2 x 2, stage 0 over sp", tiny(4, 2), (2, 2), 16, of(0, -1, once)),
    ]
}

/// Gradients sent in bf16: to partitions, to whole gradients, and to replicas that do not divide them evenly.
fn cases_in_bf16() -> Vec<Case> {
    let of = |stage: usize, extra: Value| {
        let mut config = json!({
            "zero_optimization": { "stage": stage },
            "communication_data_type": "bf16", "seq_parallel_communication_data_type": "bf16",
        });
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        config
    };
    let twice = json!({ "gradient_accumulation_steps": 2 });
    let over_sp = json!({ "ulysses": { "zero_partition_axes": ["dp", "sp"] } });
    vec![
        case("dp 3, stage 0, sent in bf16", tiny(4, 2), (3, 1), 16, of(0, twice.clone())),
        case("2 x 2, stage 0, sent in bf16", tiny(8, 4), (2, 2), 22, of(0, json!({}))),
        case("1 x 3, stage 0, sent in bf16", tiny(6, 3), (1, 3), 22, of(0, json!({}))),
        case("2 x 3, stage 1, sent in bf16", tiny(6, 2), (2, 3), 25, of(1, json!({}))),
        case("2 x 3, stage 2, sent in bf16", tied(tiny(6, 2)), (2, 3), 25, of(2, twice.clone())),
        case("2 x 3, stage 3, sent in bf16", tiny(8, 4), (2, 3), 26, of(3, twice)),
        case("2 x 2, stage 3 over sp, sent in bf16", tiny(4, 2), (2, 2), 16, of(3, over_sp)),
    ]
}

/// Features that reduce a step's memory: intervals, tiles, head chunks, offload, frozen parameters.
fn memory_cases() -> Vec<Case> {
    let with =
        |stage: usize, ulysses: Value| json!({ "zero_optimization": { "stage": stage }, "ulysses": ulysses });
    let every_other = json!({ "activation_checkpointing": true, "activation_checkpointing_interval": 2 });
    let chunks = |chunks: usize, checkpointing: bool| {
        // With two, one chunk after the other; with more, overlapping.
        json!({ "head_chunks": chunks, "overlap_exchange": chunks > 2, "activation_checkpointing": checkpointing })
    };
    let tiles = json!({ "tile_tokens": 5, "activation_checkpointing": true });
    let recomputed = |chunks: usize| json!({ "activation_checkpointing": true, "save_attention_output": false, "head_chunks": chunks, "overlap_exchange": true });
    let mut offload = with(3, json!({ "head_chunks": 2, "activation_checkpointing": true }));
    offload["activation_checkpointing"] = json!({ "cpu_checkpointing": true });
    let mut offloaded_output = offload.clone();
    offloaded_output["ulysses"]["save_attention_output"] = json!(true);
    offloaded_output["bf16"] = json!({ "enabled": true });
    let frozen = |patterns: &[&str]| {
        let groups: Vec<_> = patterns.iter().map(|name| json!({ "match": name, "frozen": true })).collect();
        json!({ "parameter_groups": groups })
    };
    // All of the first layer, parts of the others, and the embedding.
    let lower = frozen(&["embed_tokens", "layers.0.", "mlp"]);
    let lamb = json!({
        "optimizer": { "type": "Lamb" }, "zero_optimization": { "stage": 1 }, "ulysses": frozen(&["_proj"]),
    });
    let in_files = |optimizer: &str| {
        let file = json!({ "device": "nvme" });
        let zero = json!({ "stage": 3, "offload_optimizer": file, "offload_param": file });
        json!({ "zero_optimization": zero, "optimizer": { "type": optimizer }, "ulysses": chunks(1, true) })
    };
    let files_twice = |stage: u8, axes: &[&str]| {
        let zero = json!({ "stage": stage, "offload_optimizer": { "device": "nvme" } });
        let ulysses = json!({ "zero_partition_axes": axes });
        json!({ "zero_optimization": zero, "gradient_accumulation_steps": 2, "ulysses": ulysses })
    };
    let mut twice = with(3, lower.clone());
    twice["gradient_accumulation_steps"] = json!(2);
    vec![
        case("every other layer", tiny(8, 4), (2, 2), 22, with(3, every_other)),
        case("tiles, sp 2", tiny(8, 4), (1, 2), 25, with(0, tiles)),
        case("2 chunks, sp 2", tiny(8, 4), (1, 2), 25, with(0, chunks(2, false))),
        case("3 chunks, uneven, sp 2", tiny(8, 4), (1, 2), 25, with(2, chunks(3, true))),
        case("4 chunks, 2 x 2", tiny(8, 4), (2, 2), 22, with(3, chunks(4, true))),
        case("offload, 2 x 2", tiny(8, 4), (2, 2), 22, offload),
        case("offload of the attention output, 2 x 2", tiny(8, 4), (2, 2), 22, offloaded_output),
        case("attention recomputed, sp 3", tiny(8, 4), (1, 3), 25, with(0, recomputed(1))),
        case("attention recomputed in 2 chunks, sp 2", tiny(8, 4), (1, 2), 25, with(3, recomputed(2))),
        case("state and parameters in files, 2 x 2", tiny(8, 4), (2, 2), 22, in_files("AdamW")),
        case("state and parameters in files, LAMB", tied(tiny(8, 4)), (3, 1), 16, in_files("Lamb")),
        case("gradients in files, 2 x 2, twice", tiny(8, 4), (2, 2), 22, files_twice(2, &["dp"])),
        case(
            "gradients in files over sp, twice",
            tied(tiny(8, 4)),
            (2, 2),
            22,
            files_twice(3, &["dp", "sp"]),
        ),
        case("frozen below, 2 x 2, stage 0", tiny(8, 4), (2, 2), 22, with(0, lower.clone())),
        case("frozen below, 2 x 2, stage 1", tiny(8, 4), (2, 2), 22, with(1, lower.clone())),
        case("frozen below, 2 x 2, stage 2", tiny(8, 4), (2, 2), 22, with(2, lower)),
        case("frozen below, 2 x 2, stage 3, twice", tiny(8, 4), (2, 2), 22, twice),
        case("frozen matrices, LAMB", tied(tiny(8, 4)), (3, 1), 16, lamb),
    ]
}

impl Case {
    fn config(&self) -> Config {
        let (dp, sp) = self.mesh;
        let mut config = self.config.clone();
        config["mesh_param"] = json!([dp, sp]);
        config["train_micro_batch_size_per_gpu"] = json!(2);
        config["ulysses"]["seq_len"] = json!(self.seq_len);
        Config::from_json_str(&config.to_string(), "test.json").unwrap()
    }

    /// Collectives that each rank starts and bytes that it sends in a step.
    fn run(&self) -> Vec<(Vec<Started>, Moved)> {
        let config = self.config();
        let rows = config.train_batch_size;
        let batch = global_batch(&Batch::random(self.model.vocab_size, rows, self.seq_len, 3)).unwrap();
        let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let log = Log::default();
            let recorded = Recorded::groups(&groups, &log);
            let model = Model::new(&self.model)?;
            let (attention, device) = (Arc::new(FlashAttention::default()), test_device());
            let weights = RandomWeights { seed: 1 };
            let mut engine = Engine::with_attention(model, &weights, &config, recorded, attention, &device)?;
            let mut micro_batches = micro_batches(&batch, &engine)?.into_iter();
            log.lock().unwrap().clear();
            let before = moved(&groups)?;
            engine.train_batch(|| Ok::<_, DataError>(micro_batches.next().unwrap()))?;
            let mut after = moved(&groups)?;
            for (key, (sent, received)) in before {
                let entry = after.get_mut(&key).unwrap();
                *entry = (entry.0 - sent, entry.1 - received);
            }
            after.retain(|_, bytes| *bytes != (0, 0));
            let mut log = std::mem::take(&mut *log.lock().unwrap());
            if groups.sp.world_size() == 1 {
                // One group, which is listed under the first of its axes.
                log.iter_mut().filter(|call| call.axis == "tokens").for_each(|call| call.axis = "tp");
            }
            Ok((log, after))
        });
        ranks.unwrap()
    }

    /// The same by the dry engine.
    fn planned(&self, rank: usize) -> (Vec<Started>, Moved) {
        let transfers = self.transfers(rank);
        let started = |transfer: &Transfer| Started {
            op: transfer.op,
            axis: transfer.axis.name(),
            input_bytes: transfer.input_bytes,
        };
        let mut moved = Moved::new();
        for transfer in &transfers {
            let entry = moved.entry((transfer.axis.name(), transfer.op)).or_default();
            *entry = (entry.0 + transfer.sent_bytes(), entry.1 + transfer.received_bytes);
        }
        (transfers.iter().map(started).collect(), moved)
    }

    fn events(&self, rank: usize) -> Vec<Event> {
        let device = if is_cpu() { DeviceKind::Cpu } else { DeviceKind::Cuda };
        let (config, model) = (self.config(), self.model.clone());
        let workload = Workload { config, model, document_len: None, ranks_per_node: 1, device };
        workload.events(rank).unwrap()
    }

    fn transfers(&self, rank: usize) -> Vec<Transfer> {
        let transfer = |event| if let Event::Collective(transfer) = event { Some(transfer) } else { None };
        self.events(rank).into_iter().filter_map(transfer).collect()
    }
}

/// Bytes that a rank has moved, once its peers have received everything it sent.
fn moved(groups: &TrainingGroups) -> anyhow::Result<Moved> {
    let mut moved = Moved::new();
    for (axis, group) in groups.by_axis() {
        group.barrier()?;
        for (op, stats) in group.stats().ops {
            // Tied stages have another group of their axis.
            let (sent, received) = moved.entry((axis, op)).or_default();
            (*sent, *received) = (*sent + stats.bytes_sent, *received + stats.bytes_received);
        }
    }
    Ok(moved)
}

#[test]
fn a_dry_run_communicates_as_real_ranks_do_event_for_event() {
    for case in sampled(cases(), |case| axes(case.mesh, &case.config)) {
        for (rank, (started, moved)) in case.run().into_iter().enumerate() {
            let (expected, expected_moved) = case.planned(rank);
            let differs = started.iter().zip(&expected).position(|(started, expected)| started != expected);
            let at = differs.unwrap_or(started.len().min(expected.len()));
            let (label, real, told) = (case.label, started.get(at), expected.get(at));
            assert!(started == expected, "{label}, rank {rank}, event {at}: {real:?} is planned as {told:?}");
            assert_eq!(moved, expected_moved, "{label}, rank {rank}");
        }
    }
}

#[test]
fn started_operations_are_awaited_once_and_in_order() {
    for case in cases() {
        let mut under_way: BTreeMap<(Purpose, Axis), i64> = BTreeMap::new();
        for event in case.events(0) {
            match event {
                Event::Collective(transfer) if !transfer.is_awaited_at_once() => {
                    *under_way.entry((transfer.purpose, transfer.axis)).or_default() += 1;
                }
                Event::Wait { purpose, axis } => {
                    let left = under_way.entry((purpose, axis)).or_default();
                    *left -= 1;
                    assert!(*left >= 0, "{}: no rank has started to {purpose}", case.label);
                }
                _ => {}
            }
            // A layer's communication and the next one's; a reduction and the previous one. Of head chunks, what two
            // send to the heads and one returns.
            assert!(under_way.values().all(|count| *count <= 5), "{}: {under_way:?}", case.label);
        }
        assert!(under_way.values().all(|count| *count == 0), "{}: {under_way:?}", case.label);
    }
}

#[test]
fn what_a_rank_sends_its_peer_receives() {
    // The ranks of other stages have other transfers.
    for case in cases().into_iter().filter(|case| case.config().mesh.pp_size == 1) {
        let (dp, sp) = case.mesh;
        let config = case.config();
        let shards = config.zero_shards().unwrap_or(ShardShape { dp_size: dp, spans_sp: false });
        let sharded = DeviceMesh::dp_sp(dp, sp).unwrap().sharded(shards).unwrap();
        let ring = DeviceMesh::dp_sp(dp, sp).unwrap().ring(config.seq_sharding().ring_size).unwrap();
        let all: Vec<_> = (0..dp * sp).map(|rank| case.transfers(rank)).collect();
        for (rank, transfers) in all.iter().enumerate() {
            for (index, transfer) in transfers.iter().enumerate() {
                let (own_dp, own_sp) = (rank / sp, rank % sp);
                let members: Vec<usize> = match transfer.axis.name() {
                    "dp" => (0..dp).map(|peer| peer * sp + own_sp).collect(),
                    "sp" => (0..sp).map(|peer| own_dp * sp + peer).collect(),
                    axis @ ("ring" | "ulysses") => ring.group_of(axis, rank).unwrap(),
                    axis => sharded.group_of(axis, rank).unwrap(),
                };
                let place = members.iter().position(|member| *member == rank).unwrap();
                let from_all: u64 = members.iter().map(|peer| all[*peer][index].sent_to[place]).sum();
                assert_eq!(from_all, transfer.received_bytes, "{}, rank {rank}, {transfer:?}", case.label);
            }
        }
    }
}

#[test]
fn kernels_of_very_long_sequences_have_valid_grids() {
    // Norms over heads have the most rows: 64 per token.
    let model = ModelConfig { vocab_size: 256, ..shape("qwen3-32b").unwrap().with_num_layers(1) };
    let config = json!({
        "train_batch_size": 1, "bf16": { "enabled": true },
        "ulysses": { "seq_len": 8 << 20, "activation_checkpointing": true, "loss_tile_tokens": 8192 },
    });
    let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
    let device = DeviceKind::Cuda;
    let workload = Workload { config, model, document_len: Some(4096), ranks_per_node: 1, device };
    workload.plan().unwrap();
}

#[test]
fn a_plan_restores_the_counters_of_its_thread() {
    let config = json!({ "train_batch_size": 2, "ulysses": { "seq_len": 64 } });
    let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
    let (model, device) = (preset("nano").unwrap(), DeviceKind::Cpu);
    let workload = Workload { config, model, document_len: None, ranks_per_node: 1, device };
    let plan = || drop((workload.plan().unwrap(), workload.events(0).unwrap()));
    plan();
    let counters = || (live_bytes(), live_by_category());
    // Other tests may free a block that this thread shares with them during one plan, but not during each of several.
    let is_restored = || {
        let before = counters();
        plan();
        counters() == before
    };
    assert!((0..8).any(|_| is_restored()), "every plan changed the counters");
    let is_held = || {
        let before = live_bytes();
        let events = workload.events(0).unwrap();
        live_bytes() >= before + std::mem::size_of_val(&events[..]) as i64
    };
    assert!((0..8).any(|_| is_held()), "what a dry run returns is not held");
}
