//! The plan's memory against the allocator's count, over configurations that differ in everything that
//! affects memory.

use super::dry_run::axes;
#[cfg(feature = "nccl")]
use crate::support::device::is_cpu;
use crate::support::device::test_device;
use crate::support::mesh_run::{global_batch, micro_batches, on_mesh};
use crate::support::reference::{Batch, IGNORED};
use crate::support::sample::sampled_every;
use serde_json::{Value, json};
use std::sync::Arc;
use ulysses::comm::ProcessGroupExt;
use ulysses::comm::thread::LaunchOptions;
use ulysses::config::{AttentionChoice, Config};
use ulysses::data::DataError;
use ulysses::device::DeviceKind;
#[cfg(feature = "nccl")]
use ulysses::device::{gpu_memory, reset_gpu_peak};
use ulysses::engine::Engine;
use ulysses::estimate::Workload;
use ulysses::kernels::attention::{AttentionKernels, FlashAttention};
use ulysses::memory::{ByCategory, Category, live_bytes, peak_by_category, peak_bytes, reset_peak};
use ulysses::model::{Model, ModelConfig, RandomWeights, preset};

/// Tolerance of the plan. It is exact except for bookkeeping, if reductions complete when they are waited
/// for. At stages 2 and 3, a wait for something else may complete them earlier and free a unit's whole
/// gradient by then; the plan assumes the later moment.
const TOLERANCE: f64 = 0.10;

struct Case {
    label: &'static str,
    model: ModelConfig,
    mesh: (usize, usize),
    rows: usize,
    seq_len: usize,
    config: Value,
}

fn model(num_heads: usize, num_kv_heads: usize, vocab_size: usize) -> ModelConfig {
    let small = preset("small").unwrap().with_num_layers(2).with_attention(|layer| {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (num_heads, num_kv_heads, 256 / num_heads);
    });
    ModelConfig { vocab_size, ..small }
}

/// Small cases that differ in a GPU's memory.
#[cfg(feature = "nccl")]
fn cases_of_gpus() -> Vec<Case> {
    let case = |label, heads: (usize, usize), vocab_size, mesh, seq_len, config| {
        let model = model(heads.0, heads.1, vocab_size).with_num_layers(2);
        Case { label, model, mesh, rows: 1, seq_len, config }
    };
    let checkpointing = json!({ "activation_checkpointing": true });
    let tiles = json!({ "activation_checkpointing": true, "tile_tokens": 100, "loss_tile_tokens": 64 });
    let tiled = json!({ "activation_checkpointing": true, "tile_tokens": 100, "attention": "tiled" });
    let bf16 = json!({ "enabled": true });
    vec![
        case("one GPU", (8, 8), 256, (1, 1), 200, json!({})),
        case("checkpointing, GQA", (8, 2), 256, (1, 1), 300, json!({ "ulysses": checkpointing })),
        case("bf16", (8, 4), 256, (1, 1), 256, json!({ "bf16": bf16 })),
        case("bf16, tiles", (4, 4), 2000, (1, 1), 300, json!({ "bf16": bf16, "ulysses": tiles })),
        case("bf16, tiled", (4, 4), 2000, (1, 1), 300, json!({ "bf16": bf16, "ulysses": tiled })),
        case(
            "dp 2, stage 1, bf16",
            (8, 8),
            256,
            (2, 1),
            160,
            json!({ "bf16": bf16, "zero_optimization": { "stage": 1 } }),
        ),
    ]
}

/// A config section with partitions over dp and sp.
fn over_sp(stage: usize, mut config: Value) -> Value {
    config["zero_optimization"]["stage"] = json!(stage);
    config["ulysses"]["zero_partition_axes"] = json!(["dp", "sp"]);
    config
}

fn cases() -> Vec<Case> {
    let case = |label, model, mesh, rows, seq_len, config| Case { label, model, mesh, rows, seq_len, config };
    let bf16 = json!({ "enabled": true });
    let stage = |stage: usize| json!({ "stage": stage });
    let checkpointing = json!({ "activation_checkpointing": true });
    let tied = ModelConfig { tie_word_embeddings: true, ..model(8, 4, 4000) };
    vec![
        case("one rank", model(8, 8, 256), (1, 1), 1, 600, json!({})),
        case("checkpointing", model(8, 8, 256), (1, 1), 1, 900, json!({ "ulysses": checkpointing })),
        case("two rows", model(8, 2, 256), (1, 1), 2, 400, json!({})),
        case("sp 2", model(8, 8, 256), (1, 2), 1, 1000, json!({})),
        case(
            "sp 2, GQA, checkpointing",
            model(8, 2, 256),
            (1, 2),
            1,
            4096,
            json!({ "ulysses": checkpointing }),
        ),
        case("sp 3, uneven", model(8, 4, 256), (1, 3), 1, 1001, json!({})),
        case("sp 3, one KV head", model(8, 1, 256), (1, 3), 1, 1001, json!({ "ulysses": checkpointing })),
        case("sp 4, bf16", model(8, 2, 256), (1, 4), 1, 900, json!({ "bf16": bf16 })),
        case("ring 2", model(8, 8, 256), (1, 2), 1, 1000, json!({ "ulysses": { "ring_size": 2 } })),
        case("ring 3, uneven", model(8, 4, 256), (1, 3), 1, 1001, json!({ "ulysses": { "ring_size": 3 } })),
        case(
            "ring 2 x ulysses 2, bf16, checkpointing",
            model(8, 2, 256),
            (1, 4),
            1,
            1800,
            json!({ "bf16": bf16, "ulysses": { "ring_size": 2, "activation_checkpointing": true } }),
        ),
        case(
            "bf16, checkpointing",
            model(8, 8, 256),
            (1, 1),
            1,
            2048,
            json!({ "bf16": bf16, "ulysses": checkpointing }),
        ),
        case("fp16", model(8, 8, 4000), (1, 1), 1, 1500, json!({ "fp16": bf16 })),
        case(
            "bf16, loss in tiles",
            model(8, 8, 4000),
            (1, 1),
            1,
            3000,
            json!({ "bf16": bf16, "ulysses": { "activation_checkpointing": true, "loss_tile_tokens": 128 } }),
        ),
        case("dp 2, stage 1", model(8, 8, 4000), (2, 1), 1, 300, json!({ "zero_optimization": stage(1) })),
        case("dp 2, stage 2", model(8, 4, 4000), (2, 1), 1, 300, json!({ "zero_optimization": stage(2) })),
        case(
            "dp 2, stage 2, gradients sent in bf16",
            model(8, 4, 4000),
            (2, 1),
            1,
            300,
            json!({ "zero_optimization": stage(2), "communication_data_type": "bf16" }),
        ),
        case(
            "dp 2, stage 0, gradients sent in bf16",
            model(8, 4, 4000),
            (2, 1),
            1,
            300,
            json!({ "communication_data_type": "bf16" }),
        ),
        case("dp 3, stage 3", model(8, 4, 4000), (3, 1), 1, 600, json!({ "zero_optimization": stage(3) })),
        case(
            "stage 3, tied, accumulation",
            tied,
            (2, 1),
            1,
            700,
            json!({ "zero_optimization": stage(3), "gradient_accumulation_steps": 2 }),
        ),
        case(
            "2 x 2, stage 2, accumulation",
            model(8, 8, 256),
            (2, 2),
            1,
            2048,
            json!({ "zero_optimization": stage(2), "gradient_accumulation_steps": 2 }),
        ),
        case(
            "2 x 3, stage 3, bf16",
            model(8, 4, 256),
            (2, 3),
            1,
            // Whether a layer's gradient is still in flight at the peak depends on chance: long enough that
            // it does not matter.
            5200,
            json!({ "zero_optimization": stage(3), "bf16": bf16 }),
        ),
        // In both settings the peak of a long sequence is in the loss or in a layer; with a large vocabulary and few
        // tokens it is in the state.
        case("1 x 4 over sp, stage 3", model(8, 4, 4000), (1, 4), 1, 900, over_sp(3, json!({}))),
        case("1 x 4 over sp, stage 1", model(8, 4, 4000), (1, 4), 1, 900, over_sp(1, json!({}))),
        case("2 x 2 over sp, stage 3", model(8, 4, 256), (2, 2), 1, 4000, over_sp(3, json!({}))),
        case(
            "2 x 2 over sp, stage 2",
            model(8, 4, 4000),
            (2, 2),
            1,
            900,
            over_sp(2, json!({ "bf16": bf16 })),
        ),
        case("1 x 4 over sp, bf16", model(8, 4, 256), (1, 4), 1, 8000, over_sp(3, json!({ "bf16": bf16 }))),
        case(
            "a large vocabulary",
            model(8, 8, 8_000),
            (1, 2),
            1,
            1024,
            json!({ "ulysses": { "loss_tile_tokens": 256 } }),
        ),
        case(
            "SGD",
            model(8, 8, 256),
            (1, 2),
            1,
            512,
            json!({ "optimizer": { "type": "SGD", "params": { "lr": 0.1 } } }),
        ),
    ]
    .into_iter()
    .chain(memory_cases())
    .collect()
}

/// Features that reduce a step's memory: intervals, tiles, head chunks, offload, frozen parameters.
fn memory_cases() -> Vec<Case> {
    let case = |label, mesh, config| {
        let model = model(8, 4, 256).with_num_layers(4);
        Case { label, model, mesh, rows: 1, seq_len: 1100 * mesh.1, config }
    };
    let with = |features: Value| {
        let mut config = json!({ "ulysses": { "activation_checkpointing": true } });
        config["ulysses"].as_object_mut().unwrap().extend(features.as_object().unwrap().clone());
        config
    };
    let plain = |features: Value| json!({ "ulysses": features });
    let offloaded = |features: Value| {
        let mut config = with(features);
        config["activation_checkpointing"] = json!({ "cpu_checkpointing": true });
        config
    };
    let frozen = |pattern: &str| json!({ "parameter_groups": [{ "match": pattern, "frozen": true }] });
    let recomputed_chunks =
        with(json!({ "head_chunks": 2, "overlap_exchange": true, "save_attention_output": false }));
    let mut bf16 = with(json!({ "tile_tokens": 128, "head_chunks": 2 }));
    bf16["bf16"] = json!({ "enabled": true });
    let mut stage_3 = plain(frozen("_proj"));
    stage_3["zero_optimization"] = json!({ "stage": 3 });
    let in_file = |stage: usize, sections: &[&str], precision: &str| {
        let mut config = with(json!({}));
        config["zero_optimization"] = json!({ "stage": stage });
        for section in sections {
            config["zero_optimization"][*section] = json!({ "device": "nvme" });
        }
        config["bf16"] = json!({ "enabled": precision == "bf16" });
        config
    };
    let both = ["offload_optimizer", "offload_param"];
    let mut lamb = in_file(3, &both, "bf16");
    lamb["optimizer"] = json!({ "type": "Lamb" });
    let mut twice = in_file(3, &both[..1], "bf16");
    twice["gradient_accumulation_steps"] = json!(2);
    // Whether a layer's gradient is still in flight at the peak depends on chance: sequences so long that it
    // does not matter.
    let long = |label, mesh: (usize, usize), config| {
        let case = case(label, mesh, config);
        Case { seq_len: 2 * case.seq_len, ..case }
    };
    vec![
        case("optimizer in a file", (1, 1), in_file(1, &both[..1], "f32")),
        case("optimizer in a file, dp 2, bf16", (2, 1), in_file(2, &both[..1], "bf16")),
        case("optimizer in a file, dp 2, twice", (2, 1), twice),
        case("parameters in a file, dp 2", (2, 1), in_file(3, &both[1..], "f32")),
        case("both in files", (1, 1), in_file(3, &both, "f32")),
        long("both in files, dp 2, bf16", (2, 1), in_file(3, &both, "bf16")),
        long("both in files, 2 x 2, LAMB", (2, 2), lamb),
        long("both in files, 1 x 4 over sp, bf16", (1, 4), over_sp(3, in_file(3, &both, "bf16"))),
        long("both in files, 2 x 2 over sp", (2, 2), over_sp(3, in_file(3, &both, "f32"))),
        long("optimizer in a file, 1 x 4 over sp", (1, 4), over_sp(3, in_file(3, &both[..1], "f32"))),
        long("optimizer in a file, 2 x 2 over sp, bf16", (2, 2), over_sp(2, in_file(2, &both[..1], "bf16"))),
        case("every other layer", (1, 1), with(json!({ "activation_checkpointing_interval": 2 }))),
        case("every other layer, sp 2", (1, 2), with(json!({ "activation_checkpointing_interval": 2 }))),
        case("tiles", (1, 1), plain(json!({ "tile_tokens": 128 }))),
        case("tiles, checkpointing, sp 2", (1, 2), with(json!({ "tile_tokens": 100 }))),
        case("2 chunks, sp 2", (1, 2), plain(json!({ "head_chunks": 2 }))),
        case("2 chunks, checkpointing, sp 2", (1, 2), with(json!({ "head_chunks": 2 }))),
        case(
            "2 chunks that overlap, sp 2",
            (1, 2),
            plain(json!({ "head_chunks": 2, "overlap_exchange": true })),
        ),
        case(
            "2 chunks that overlap, checkpointing, sp 2",
            (1, 2),
            with(json!({ "head_chunks": 2, "overlap_exchange": true })),
        ),
        case("3 chunks, checkpointing", (1, 1), with(json!({ "head_chunks": 3 }))),
        case("tiles, chunks, bf16, sp 2", (1, 2), bf16),
        case("attention recomputed", (1, 1), with(json!({ "save_attention_output": false }))),
        case("attention recomputed, sp 2", (1, 2), with(json!({ "save_attention_output": false }))),
        case("2 chunks recomputed, sp 2", (1, 2), recomputed_chunks),
        case("offload", (1, 1), offloaded(json!({}))),
        case("offload of the attention output", (1, 2), offloaded(json!({ "save_attention_output": true }))),
        case(
            "offload, tiles, chunks, sp 2",
            (1, 2),
            offloaded(json!({ "tile_tokens": 128, "head_chunks": 2 })),
        ),
        case("frozen MLPs", (1, 1), plain(frozen("mlp"))),
        case("frozen matrices, dp 2, stage 3", (2, 1), stage_3),
    ]
}

impl Case {
    fn config(&self) -> Config {
        let mut config = self.config.clone();
        config["mesh_param"] = json!([self.mesh.0, self.mesh.1]);
        config["train_micro_batch_size_per_gpu"] = json!(self.rows);
        config["ulysses"]["seq_len"] = json!(self.seq_len);
        Config::from_json_str(&config.to_string(), "test.json").unwrap()
    }

    fn attention(config: &Config) -> FlashAttention {
        FlashAttention::new(match config.ulysses.attention {
            Some(AttentionChoice::Tiled) => AttentionKernels::Tiled,
            Some(AttentionChoice::Fused) | None => AttentionKernels::Auto,
        })
    }

    /// The peak of each rank in the second step, above its memory before the engine existed; and the memory
    /// of its thread at that time.
    fn measured(&self) -> Vec<(i64, ByCategory)> {
        self.measured_with(|batch| batch)
    }

    /// The same with masked labels.
    fn measured_with(&self, mask: impl FnOnce(Batch) -> Batch) -> Vec<(i64, ByCategory)> {
        let config = self.config();
        let batch = Batch::random(self.model.vocab_size, config.train_batch_size, self.seq_len, 3);
        let batch = global_batch(&mask(batch)).unwrap();
        let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let before = live_bytes();
            let (attention, device) = (Arc::new(Self::attention(&config)), test_device());
            let weights = RandomWeights { seed: 1 };
            let model = Model::new(&self.model)?;
            let mut engine = Engine::with_attention(model, &weights, &config, groups, attention, &device)?;
            let (mut peak, mut by_category) = (0, ByCategory::default());
            for _ in 0..2 {
                engine.sp_group().barrier()?;
                engine.dp_group().barrier()?;
                let micro_batches = micro_batches(&batch, &engine)?;
                let held_by_test = live_bytes();
                let mut each = micro_batches.iter();
                reset_peak();
                engine.train_batch(|| Ok::<_, DataError>(each.next().unwrap().clone()))?;
                peak = peak_bytes() - before;
                by_category = peak_by_category();
                assert_eq!(by_category.total() as i64, peak_bytes());
                drop(each);
                let with = live_bytes();
                drop(micro_batches);
                // Memory of the batch that the test itself created.
                peak -= with - live_bytes();
                assert!(held_by_test >= before);
            }
            Ok((peak, by_category))
        });
        ranks.unwrap()
    }

    /// The peak of the pool of each rank's GPU in the second step, above what was in use before the engine existed.
    #[cfg(feature = "nccl")]
    fn measured_on_gpus(&self) -> Vec<u64> {
        let config = self.config();
        let batch = Batch::random(self.model.vocab_size, config.train_batch_size, self.seq_len, 3);
        let batch = global_batch(&batch).unwrap();
        let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let (attention, device) = (Arc::new(Self::attention(&config)), test_device());
            let memory = || gpu_memory(&device).expect("a GPU");
            let before = memory().in_use;
            let model = Model::new(&self.model)?;
            let weights = RandomWeights { seed: 1 };
            let mut engine = Engine::with_attention(model, &weights, &config, groups, attention, &device)?;
            for _ in 0..2 {
                device.synchronize()?;
                reset_gpu_peak(&device)?;
                let mut micro_batches = micro_batches(&batch, &engine)?.into_iter();
                engine.train_batch(|| Ok::<_, DataError>(micro_batches.next().unwrap()))?;
            }
            Ok(memory().peak - before)
        });
        ranks.unwrap()
    }

    /// The peak that the plan predicts for a rank, by category.
    fn planned(&self, rank: usize, device: DeviceKind) -> [u64; Category::ALL.len()] {
        let (config, model) = (self.config(), self.model.clone());
        let workload = Workload { config, model, document_len: None, ranks_per_node: 1, device };
        workload.plan_of(rank).unwrap().peak_by_category
    }

    /// The tolerance in terms of a unit's whole gradient or a gathered unit, as above.
    fn check_categories(&self, rank: usize, measured: i64, planned: &[u64], counted: &[u64]) {
        let label = self.label;
        for category in [Category::Parameters, Category::Gradients, Category::Optimizer] {
            let (planned, counted) = (planned[category as usize], counted[category as usize]);
            let off = planned.abs_diff(counted) as f64 / measured as f64;
            let name = category.name();
            assert!(
                off < TOLERANCE,
                "{label}, rank {rank}: {counted} of {measured} counted as {name}, {planned} planned"
            );
        }
        // Recycled storage counts as the category it was allocated for; in the plan it counts as other
        // while it is unused.
        let moving = [Category::Activations, Category::Exchange, Category::Other];
        let moves = moving.iter().all(|category| counted[*category as usize] > 0);
        assert!(moves || self.mesh.1 == 1, "{label}");
    }
}

/// Measures a peak once, because training takes minutes for all cases: the sum is compared, and every category.
#[test]
fn the_planned_peak_is_the_measured_one_in_total_and_by_category() {
    let mut off = Vec::new();
    for case in sampled_every(3, cases(), |case| axes(case.mesh, &case.config)) {
        for (rank, (measured, by_category)) in case.measured().into_iter().enumerate() {
            let planned = case.planned(rank, DeviceKind::Cpu);
            let total: u64 = planned.iter().sum();
            let error = total as f64 / measured as f64 - 1.0;
            let line = format!(
                "{:30} rank {rank}: {measured:>10} measured, {total:>10} planned, {:+.1} %",
                case.label,
                100.0 * error
            );
            println!("{line}");
            if error.abs() > TOLERANCE {
                off.push(line);
            }
            case.check_categories(rank, measured, &planned, &by_category.values());
        }
    }
    assert!(off.is_empty(), "off by more than {TOLERANCE}:\n{}", off.join("\n"));
}

/// With a GPU per rank, whose pool has nothing else.
#[cfg(feature = "nccl")]
#[test]
fn the_planned_peak_is_that_of_the_pool_on_a_gpu() {
    assert!(
        !is_cpu(),
        "a test of GPUs: set ULYSSES_TEST_DEVICE=nccl, or leave it out with `--skip on_a_gpu`"
    );
    for case in cases_of_gpus() {
        for (rank, measured) in case.measured_on_gpus().into_iter().enumerate() {
            let planned: u64 = case.planned(rank, DeviceKind::Cuda).iter().sum();
            let error = planned as f64 / measured as f64 - 1.0;
            let label = format!("{}, rank {rank}", case.label);
            println!("{label}: {measured} measured, {planned} planned, {:+.1} %", 100.0 * error);
            assert!(error.abs() <= TOLERANCE, "{label}: {measured} measured, {planned} planned");
        }
    }
}

#[test]
fn masked_tokens_need_no_more_memory_than_labels_everywhere() {
    let case = |label, mesh: (usize, usize), ulysses: Value| {
        let model = ModelConfig { vocab_size: 256, ..preset("nano").unwrap() };
        let config = json!({ "gradient_accumulation_steps": 2, "ulysses": ulysses });
        Case { label, model, mesh, rows: 1, seq_len: 400 * mesh.1, config }
    };
    // The second micro batch is masked otherwise than the first.
    let every_other_of_the_first = |mut batch: Batch| {
        batch.labels[0].iter_mut().step_by(2).for_each(|label| *label = IGNORED);
        batch
    };
    type Mask = fn(Batch) -> Batch;
    let masks: [(&str, Mask); 3] = [
        ("one token masked", |batch| batch.mask_tokens(7..8)),
        ("every other token of the first sequence masked", every_other_of_the_first),
        ("a masked prompt, all of the first sequence", |batch| batch.mask_tokens(0..320).mask_rows(0..1)),
    ];
    let tiles = json!({ "activation_checkpointing": true, "loss_tile_tokens": 64 });
    for case in [case("one tile", (1, 1), json!({})), case("tiles, sp 2", (1, 2), tiles)] {
        let unmasked = case.measured();
        for (name, mask) in masks {
            for (rank, ((masked, _), (unmasked, _))) in
                case.measured_with(mask).into_iter().zip(&unmasked).enumerate()
            {
                // The plan has two tables of u32, and labels everywhere do not. The other rank decides how
                // long a message lives, which moves this peak by 20 KB; a fault would cost a tile of logits.
                let (tables, logits_tile) = (400 * 8, 64 * 256 * 4);
                let allowed = unmasked + tables + logits_tile / 2;
                let what = format!("{}, {name}, rank {rank}", case.label);
                println!("{what}: {masked} masked, {unmasked} with labels everywhere");
                assert!(masked <= allowed, "{what}: {masked} bytes, at most {allowed}");
            }
        }
    }
}
