//! The communication of a dry run against that of real ranks in a step: every collective in order, with its
//! bytes.

mod hybrid_attention;
mod pipeline;

use crate::support::device::{is_cpu, test_device};
use crate::support::mesh_run::{global_batch, micro_batches, on_mesh};
use crate::support::recorded::{Log, Recorded, Started};
use crate::support::reference::Batch;
use crate::support::run_case::RunCase;
use crate::support::sample::sampled;
use serde_json::json;
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

fn tiny(num_heads: usize, num_kv_heads: usize) -> ModelConfig {
    let nano = preset("nano").unwrap().with_num_layers(3).with_attention(|layer| {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (num_heads, num_kv_heads, 8);
    });
    ModelConfig { hidden_size: 8 * num_heads, intermediate_size: 40, vocab_size: 96, ..nano }
}

fn tied(model: ModelConfig) -> ModelConfig {
    ModelConfig { tie_word_embeddings: true, ..model }
}

/// With two sequences per micro batch.
fn case(label: &'static str, model: ModelConfig, seq_len: usize) -> RunCase {
    RunCase::new(label, model, seq_len).rows(2)
}

/// Every stage, with sequences and heads that do not divide evenly, accumulation, recomputation, 16 bits.
fn cases() -> Vec<RunCase> {
    let base = vec![
        case("alone", tiny(4, 2), 24),
        case("sp 2", tiny(8, 8), 24).sp(2),
        case("sp 2, tied, stage 3 of one", tied(tiny(8, 4)), 25).sp(2).stage(3),
        case("dp 2, stage 1", tiny(4, 2), 24).dp(2).stage(1),
        case("dp 2, stage 3, tied", tied(tiny(4, 2)), 24).dp(2).stage(3).checkpointed(),
        case("sp 3, uneven", tiny(8, 4), 25).sp(3).stage(2).checkpointed(),
        case("dp 3, stage 2, twice", tiny(8, 2), 16).dp(3).stage(2).accumulation(2),
        case("dp 3, LAMB", tiny(8, 2), 16).dp(3).stage(1).optimizer("Lamb"),
        case("2 x 2, stage 0, twice", tiny(8, 4), 22).dp(2).sp(2).accumulation(2),
        case("2 x 2, stage 1, bf16", tiny(8, 1), 23).dp(2).sp(2).stage(1).bf16(),
        case("2 x 2, stage 3, means", tiny(6, 3), 22)
            .dp(2)
            .sp(2)
            .stage(3)
            .checkpointed()
            .set("loss_normalization", "micro_batch"),
        case("2 x 3, stage 3", tiny(8, 4), 26).dp(2).sp(3).stage(3).accumulation(2),
        case("3 x 2, stage 2", tied(tiny(8, 4)), 21).dp(3).sp(2).stage(2).checkpointed(),
        case("1 x 6, GQA beyond its KV heads", tiny(8, 2), 26).sp(6).stage(1),
        case("2 x 4, stage 3", tiny(8, 2), 30).dp(2).sp(4).stage(3).checkpointed(),
        case("4 x 2, stage 1", tiny(8, 8), 18).dp(4).sp(2).stage(1).accumulation(2),
        case("3 x 3, stage 3", tiny(8, 4), 16).dp(3).sp(3).stage(3),
        case("3 x 2, stage 3, uneven", tiny(7, 7), 23).dp(3).sp(2).stage(3),
        case("2 x 3, stage 1, GQA", tiny(6, 2), 25).dp(2).sp(3).stage(1),
        case("1 x 8", tiny(8, 2), 37).sp(8),
        case("8 x 1, stage 2", tied(tiny(4, 4)), 12).dp(8).stage(2),
    ];
    let cases = base.into_iter().chain(memory_cases()).chain(offload_cases()).chain(replica_cases());
    let cases = cases.chain(cases_over_sp()).chain(cases_in_bf16()).chain(ring_cases());
    cases.chain(pipeline::cases()).chain(hybrid_attention::cases()).collect()
}

/// Replicas of ZeRO's partitions along dp.
fn replica_cases() -> Vec<RunCase> {
    let case = |label, model, seq_len, shard_size: usize| {
        case(label, model, seq_len).set("zero_optimization.mics_shard_size", shard_size)
    };
    vec![
        case("4 x 2, 2 replicas, stage 3", tiny(8, 4), 22, 2).dp(4).sp(2).stage(3).accumulation(2),
        case("4 x 1, 2 replicas, stage 2", tiny(4, 2), 16, 2).dp(4).stage(2).accumulation(2),
        case("6 x 1, 2 replicas, LAMB", tied(tiny(4, 2)), 16, 3).dp(6).stage(1).optimizer("Lamb"),
        case("2 x 3, 2 replicas, stage 0", tiny(6, 3), 22, 1).dp(2).sp(3),
        case("2 x 2, 2 replicas of the whole", tiny(6, 3), 22, 1).dp(2).sp(2).stage(3),
        case("3 x 3, stage 3", tiny(6, 3), 25, 3).dp(3).sp(3).stage(3),
    ]
}

/// Rings, alone and of Ulysses groups; the last ones with blocks that do not travel all the way.
fn ring_cases() -> Vec<RunCase> {
    let mistral = ModelConfig { family: family("mistral").unwrap(), ..tiny(8, 4) };
    let windowed = mistral.with_attention(|layer| layer.window = Some(4));
    vec![
        case("ring 2", tiny(8, 4), 24).sp(2).ring(2),
        case("ring 3, two heads, uneven", tiny(2, 1), 25).sp(3).ring(3).saves_output(true),
        case("2 x ring 2, stage 3", tiny(8, 4), 23).dp(2).sp(2).ring(2).stage(3).saves_output(false),
        case("2 x ring 2 x ulysses 2", tiny(8, 4), 26).dp(2).sp(4).ring(2).stage(1),
        case("ring 2 x ulysses 3, chunks", tiny(8, 2), 40).sp(6).ring(2).overlapped(2),
        case("ring 4, a window", windowed, 64).sp(4).ring(4),
    ]
}

/// Partitions over sp, alone and with dp.
fn cases_over_sp() -> Vec<RunCase> {
    let case = |label, model, seq_len| case(label, model, seq_len).over_sp();
    vec![
        case("1 x 3, stage 3 over sp", tiny(6, 3), 22).sp(3).stage(3),
        case("1 x 4, stage 1 over sp", tied(tiny(4, 2)), 21).sp(4).stage(1).optimizer("Lamb"),
        case("2 x 2, stage 2 over sp", tiny(4, 2), 16).dp(2).sp(2).stage(2).accumulation(2),
        case("4 x 2, 2 replicas, stage 3 over sp", tiny(8, 4), 22)
            .dp(4)
            .sp(2)
            .stage(3)
            .accumulation(2)
            .set("zero_optimization.mics_shard_size", 2),
        case("2 x 2, stage 0 over sp", tiny(4, 2), 16).dp(2).sp(2),
    ]
}

/// Gradients sent in bf16: to partitions, to whole gradients, and to replicas that do not divide them evenly.
fn cases_in_bf16() -> Vec<RunCase> {
    let case = |label, model, seq_len| {
        let case = case(label, model, seq_len).set("communication_data_type", "bf16");
        case.set("seq_parallel_communication_data_type", "bf16")
    };
    vec![
        case("dp 3, stage 0, sent in bf16", tiny(4, 2), 16).dp(3).accumulation(2),
        case("2 x 2, stage 0, sent in bf16", tiny(8, 4), 22).dp(2).sp(2),
        case("1 x 3, stage 0, sent in bf16", tiny(6, 3), 22).sp(3),
        case("2 x 3, stage 1, sent in bf16", tiny(6, 2), 25).dp(2).sp(3).stage(1),
        case("2 x 3, stage 2, sent in bf16", tied(tiny(6, 2)), 25).dp(2).sp(3).stage(2).accumulation(2),
        case("2 x 3, stage 3, sent in bf16", tiny(8, 4), 26).dp(2).sp(3).stage(3).accumulation(2),
        case("2 x 2, stage 3 over sp, sent in bf16", tiny(4, 2), 16).dp(2).sp(2).stage(3).over_sp(),
    ]
}

/// Features that reduce a step's memory: intervals, tiles, head chunks, offload of activations, frozen parameters.
fn memory_cases() -> Vec<RunCase> {
    let square = |label| case(label, tiny(8, 4), 22).dp(2).sp(2);
    let row = |label, sp| case(label, tiny(8, 4), 25).sp(sp);
    // All of the first layer, parts of the others, and the embedding.
    let frozen_below = |label| square(label).frozen(&["embed_tokens", "layers.0.", "mlp"]);
    vec![
        square("every other layer").every_other().stage(3),
        row("tiles, sp 2", 2).tiles(5).checkpointed(),
        row("2 chunks, sp 2", 2).head_chunks(2),
        row("3 chunks, uneven, sp 2", 2).overlapped(3).checkpointed().stage(2),
        square("4 chunks, 2 x 2").overlapped(4).checkpointed().stage(3),
        square("offload, 2 x 2").offloaded().head_chunks(2).stage(3),
        square("offload of the attention output, 2 x 2")
            .offloaded()
            .saves_output(true)
            .head_chunks(2)
            .stage(3)
            .bf16(),
        row("attention recomputed, sp 3", 3).overlapped(1).saves_output(false),
        row("attention recomputed in 2 chunks, sp 2", 2).overlapped(2).saves_output(false).stage(3),
        frozen_below("frozen below, 2 x 2, stage 0"),
        frozen_below("frozen below, 2 x 2, stage 1").stage(1),
        frozen_below("frozen below, 2 x 2, stage 2").stage(2),
        frozen_below("frozen below, 2 x 2, stage 3, twice").stage(3).accumulation(2),
        case("frozen matrices, LAMB", tied(tiny(8, 4)), 16)
            .dp(3)
            .frozen(&["_proj"])
            .optimizer("Lamb")
            .stage(1),
    ]
}

/// State, parameters and gradients in files.
fn offload_cases() -> Vec<RunCase> {
    let square = |label, model| case(label, model, 22).dp(2).sp(2).in_file("offload_optimizer");
    let lamb = case("state and parameters in files, LAMB", tied(tiny(8, 4)), 16).dp(3).optimizer("Lamb");
    vec![
        square("state and parameters in files, 2 x 2", tiny(8, 4))
            .in_file("offload_param")
            .stage(3)
            .checkpointed(),
        lamb.in_file("offload_optimizer").in_file("offload_param").stage(3).checkpointed(),
        square("gradients in files, 2 x 2, twice", tiny(8, 4)).stage(2).accumulation(2),
        square("gradients in files over sp, twice", tied(tiny(8, 4))).stage(3).accumulation(2).over_sp(),
    ]
}

impl RunCase {
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
    for case in sampled(cases(), RunCase::axes) {
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
        let (dp, sp) = (case.dp, case.sp);
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
