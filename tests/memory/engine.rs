//! The memory of a rank, by the allocator: against ZeRO's formulas, and against the engine's own report.

use crate::support::device::test_device;
use crate::support::doubles::Hooked;
use crate::support::mesh_run::{global_batch, micro_batches, on_mesh};
use crate::support::reference::Batch;
use anyhow::Result;
use serde_json::json;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex};
use ulysses::comm::thread::LaunchOptions;
use ulysses::comm::{ProcessGroupExt, TrainingGroups};
use ulysses::config::{Config, PartitionAxes};
use ulysses::data::{DataError, MicroBatch};
use ulysses::engine::Engine;
use ulysses::kernels::attention::FlashAttention;
use ulysses::memory::{AllocationMeter, live_by_category, live_bytes, peak_bytes, reset_peak};
use ulysses::model::{Model, ModelConfig, ModelError, RandomWeights, WeightSource, family};
use ulysses::nn::ParameterSpec;

/// Wide enough that names, views and plans are below 1 % of its tensors on every rank.
static MODEL: LazyLock<ModelConfig> = LazyLock::new(|| {
    let sizes = ModelConfig::with_sizes(family("llama").unwrap(), [128, 4, 8, 4, 320]);
    ModelConfig { vocab_size: 1024, ..sizes }
});

/// Bytes of one decoder layer: q and o, k and v, the MLP, two norms.
const LAYER: usize = 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 320 * 128 + 2 * 128);

/// Ψ: embedding, layers, final norm and head. All units are multiples of 4, so nothing is padded.
const PARAMETERS: usize = 4 * (2 * 1024 * 128 + 128) + 4 * LAYER;

pub(crate) fn config(dp: usize, sp: usize, stage: usize, checkpointing: bool) -> Config {
    let json = json!({
        "train_batch_size": 2 * dp,
        "mesh_param": [dp, sp],
        "zero_optimization": { "stage": stage },
        "optimizer": { "type": "AdamW", "params": { "lr": 1e-3 } },
        "ulysses": { "activation_checkpointing": checkpointing },
    });
    Config::from_json_str(&json.to_string(), "test.json").unwrap()
}

/// One value everywhere, which is fast to create.
struct Constant;

impl WeightSource for Constant {
    fn read(&self, _: &ParameterSpec, _: Range<usize>, out: &mut [f32]) -> Result<(), ModelError> {
        out.fill(0.01);
        Ok(())
    }
}

fn engine(
    model: Model,
    weights: &dyn WeightSource,
    config: &Config,
    groups: TrainingGroups,
) -> Result<Engine> {
    Ok(Engine::with_attention(
        model,
        weights,
        config,
        groups,
        Arc::new(FlashAttention::default()),
        &test_device(),
    )?)
}

/// Runs `work` on every rank with its engine and its micro batch of two sequences.
pub(crate) fn on_engines<T: Send>(
    config: &Config,
    seq_len: usize,
    work: impl Fn(&mut Engine, &MicroBatch) -> Result<T> + Sync,
) -> Vec<T> {
    let global = global_batch(&Batch::random(MODEL.vocab_size, config.train_batch_size, seq_len, 3)).unwrap();
    let ranks = on_mesh(config, &LaunchOptions::default(), |_, groups| {
        let mut engine = engine(Model::new(&MODEL)?, &RandomWeights { seed: 1 }, config, groups)?;
        let batch = micro_batches(&global, &engine)?.remove(0);
        work(&mut engine, &batch)
    });
    ranks.unwrap()
}

/// Percent: with the feature `cuda`, candle's tensors and views are larger (measured: up to 134).
const WITH_CUDA: u64 = if cfg!(feature = "cuda") { 140 } else { 100 };

/// At least the tensors, at most 1 % more for names, shapes and views.
fn assert_holds(label: &str, held: u64, tensors: usize) {
    let tensors = tensors as u64;
    assert!(
        (tensors..=tensors + tensors / 100 * WITH_CUDA / 100).contains(&held),
        "{label}: {held} held, {tensors} of tensors"
    );
}

#[test]
fn parameters_gradients_and_optimizer_state_take_the_bytes_of_zeros_formula() {
    let over_dp = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)].map(|mesh| (mesh, PartitionAxes::Dp));
    let over_sp = [(1, 4), (2, 2)].map(|mesh| (mesh, PartitionAxes::DpSp));
    for ((dp, sp), axes) in over_dp.into_iter().chain(over_sp) {
        let partitions = if axes == PartitionAxes::DpSp { dp * sp } else { dp };
        for stage in 0..=3 {
            let mut config = config(dp, sp, stage, false);
            config.ulysses.zero_partition_axes = axes;
            let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
                let model = Model::new(&MODEL)?;
                let meter = AllocationMeter::start();
                let engine = engine(model, &Constant, &config, groups)?;
                let all = meter.bytes();
                let counted = live_by_category();
                let held = engine.zero().state_bytes();
                assert_eq!(counted.total() as i64, live_bytes());
                for (counted, held) in [
                    (counted.parameters, held.parameters),
                    (counted.gradients, held.gradients),
                    (counted.optimizer, held.optimizer),
                ] {
                    // Names and views next to the tensors are small blocks.
                    assert!(counted <= held && held - counted < held / 50, "{counted} counted, {held} held");
                }
                assert_eq!(
                    engine.zero().expected_state_bytes().total(),
                    by_formula(stage, partitions) as u64
                );
                Ok((all, engine.zero().state_bytes()))
            });
            let of = |partitioned: bool| if partitioned { PARAMETERS / partitions } else { PARAMETERS };
            for (rank, (all, held)) in ranks.unwrap().into_iter().enumerate() {
                let label = format!("{dp}x{sp} over {axes:?} stage {stage} rank {rank}");
                assert_holds(&format!("{label}: parameters"), held.parameters, of(stage >= 3));
                assert_holds(&format!("{label}: gradients"), held.gradients, of(stage >= 2));
                assert_holds(&format!("{label}: optimizer"), held.optimizer, 2 * of(stage >= 1));
                assert_holds(&format!("{label}: the engine"), all, by_formula(stage, partitions));
            }
        }
    }
}

#[test]
fn every_optimizer_allocates_the_state_tensors_of_its_rule() {
    let optimizers = [("Lion", 1), ("Adagrad", 1), ("Lamb", 2)];
    for ((optimizer, state_tensors), stage) in
        optimizers.into_iter().flat_map(|optimizer| [0, 1, 3].map(|stage| (optimizer, stage)))
    {
        let json = json!({
            "train_batch_size": 4,
            "mesh_param": [2, 1],
            "zero_optimization": { "stage": stage },
            "optimizer": { "type": optimizer },
        });
        let config = Config::from_json_str(&json.to_string(), "test.json").unwrap();
        let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let engine = engine(Model::new(&MODEL)?, &Constant, &config, groups)?;
            Ok((engine.zero().state_bytes(), engine.zero().expected_state_bytes()))
        });
        let updated = if stage == 0 { PARAMETERS } else { PARAMETERS / 2 };
        for (held, expected) in ranks.unwrap() {
            let label = format!("{optimizer} at stage {stage}");
            assert_eq!(expected.optimizer, (state_tensors * updated) as u64, "{label}");
            assert_holds(&label, held.optimizer, state_tensors * updated);
        }
    }
}

/// Frozen parameters have no other memory, and are partitioned at stage 3 like the others.
#[test]
fn frozen_parameters_have_no_gradients_and_no_state() {
    // All layers except their norms; a layer has two norms of 128.
    const FROZEN: usize = 4 * (LAYER - 4 * 2 * 128);
    const TRAINED: usize = PARAMETERS - FROZEN;
    for (dtype, element) in [("f32", 4), ("bf16", 2)] {
        for (dp, stage) in [1, 2, 4].into_iter().flat_map(|dp| [0, 1, 2, 3].map(|stage| (dp, stage))) {
            let json = json!({
                "train_batch_size": 4,
                "mesh_param": [dp, 1],
                "bf16": { "enabled": dtype == "bf16" },
                "zero_optimization": { "stage": stage },
                "ulysses": { "parameter_groups": [{ "match": "_proj", "frozen": true }] },
            });
            let config = Config::from_json_str(&json.to_string(), "test.json").unwrap();
            let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
                let model = Model::new(&MODEL)?;
                let meter = AllocationMeter::start();
                let engine = engine(model, &Constant, &config, groups)?;
                Ok((meter.bytes(), engine.zero().state_bytes(), engine.zero().expected_state_bytes()))
            });
            let of = |bytes: usize, partitioned: bool| if partitioned { bytes / dp } else { bytes };
            let f32_copies = if dtype == "bf16" { 3 } else { 2 };
            let parameters = of((FROZEN + TRAINED) / 4 * element, stage >= 3);
            let gradients = of(TRAINED, stage >= 2);
            let optimizer = of(f32_copies * TRAINED, stage >= 1);
            for (all, held, expected) in ranks.unwrap() {
                let label = format!("{dtype} dp {dp} stage {stage}");
                for (what, held, expected, by_hand) in [
                    ("parameters", held.parameters, expected.parameters, parameters),
                    ("gradients", held.gradients, expected.gradients, gradients),
                    ("optimizer", held.optimizer, expected.optimizer, optimizer),
                ] {
                    assert_eq!(expected, by_hand as u64, "{label}: {what} by formula");
                    assert_holds(&format!("{label}: {what}"), held, by_hand);
                }
                // Names, views and the compiled pattern.
                let (tensors, bookkeeping) =
                    ((parameters + gradients + optimizer) as u64, (36 << 10) * WITH_CUDA / 100);
                assert!(
                    (tensors..tensors + bookkeeping).contains(&all),
                    "{label}: {all} held, {tensors} of tensors"
                );
            }
        }
    }
}

/// Memory of a rank before its first step, and the peak of its second step.
fn held_and_peak((dp, sp): (usize, usize), precision: &str, offload: serde_json::Value) -> Vec<(i64, i64)> {
    let mut json = json!({
        "train_batch_size": dp,
        "mesh_param": [dp, sp],
        "ulysses": { "zero_partition_axes": ["dp", "sp"] },
        "bf16": { "enabled": precision == "bf16" },
        "zero_optimization": offload,
    });
    json["zero_optimization"]["stage"] = json!(3);
    let config = Config::from_json_str(&json.to_string(), "test.json").unwrap();
    let global = global_batch(&Batch::random(MODEL.vocab_size, dp, 8, 3)).unwrap();
    let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
        let before = live_bytes();
        let mut engine = engine(Model::new(&MODEL)?, &RandomWeights { seed: 1 }, &config, groups)?;
        let held = live_bytes() - before;
        let (by_zero, expected) = (engine.zero().state_bytes(), engine.zero().expected_state_bytes());
        assert!(by_zero.total() >= expected.total());
        assert!(held - (expected.total() as i64) < 64 << 10, "{held} held, {expected:?}");
        let batch = micro_batches(&global, &engine)?.remove(0);
        engine.train_batch(|| Ok::<_, DataError>(batch.clone()))?;
        reset_peak();
        engine.train_batch(|| Ok::<_, DataError>(batch.clone()))?;
        Ok((held, peak_bytes() - before))
    });
    ranks.unwrap()
}

#[test]
fn offloaded_state_and_gradients_are_in_memory_for_two_units_at_a_time() {
    let file = json!({ "device": "nvme" });
    let meshes = [(1, 1), (2, 1), (1, 4), (2, 2)];
    for (mesh, (precision, state, parameters)) in
        meshes.into_iter().flat_map(|mesh| [("f32", 2, 4), ("bf16", 3, 2)].map(|precision| (mesh, precision)))
    {
        let plain = held_and_peak(mesh, precision, json!({}));
        let optimizer = held_and_peak(mesh, precision, json!({ "offload_optimizer": file }));
        let both =
            held_and_peak(mesh, precision, json!({ "offload_optimizer": file, "offload_param": file }));
        let partitions = mesh.0 * mesh.1;
        let (all, unit) = (PARAMETERS / partitions, LAYER / partitions);
        // With the f32 gradient, which is offloaded with the state.
        let state = |bytes: usize| ((state + 1) * bytes) as i64;
        let parameters = |bytes: usize| (parameters * bytes / 4) as i64;
        for ((plain, optimizer), both) in plain.into_iter().zip(optimizer).zip(both) {
            let (label, bookkeeping) = (format!("{mesh:?} {precision}"), 64 << 10);
            let saved = plain.0 - optimizer.0;
            assert!((saved - state(all)).abs() < bookkeeping, "{label}: {saved}");
            let saved = optimizer.0 - both.0;
            assert!((saved - parameters(all)).abs() < bookkeeping, "{label}: {saved}");
            // One unit is updated while another one is written.
            let saved = plain.1 - optimizer.1;
            assert!(saved > state(all) - 2 * state(unit) - bookkeeping, "{label}: {saved} at the peak");
            let saved = plain.1 - both.1;
            let expected = state(all) + parameters(all) - 2 * state(unit) - 2 * parameters(unit);
            assert!(saved > expected - bookkeeping, "{label}: {saved} at the peak");
        }
    }
}

/// f32 with AdamW, from the ZeRO paper: 16Ψ; 8Ψ + 8Ψ/S; 4Ψ + 12Ψ/S; 16Ψ/S, in bytes.
fn by_formula(stage: usize, partitions: usize) -> usize {
    let numel = PARAMETERS / 4;
    match stage {
        0 => 16 * numel,
        1 => 8 * numel + 8 * numel / partitions,
        2 => 4 * numel + 12 * numel / partitions,
        _ => 16 * numel / partitions,
    }
}

#[test]
fn a_step_leaves_the_memory_of_a_rank_unchanged() {
    for (dp, sp) in [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)] {
        for stage in 0..=3 {
            let grown = on_engines(&config(dp, sp, stage, false), 24, |engine, batch| {
                let mut step = || {
                    engine.train_batch(|| Ok::<_, DataError>(batch.clone()))?;
                    engine.workspace().clear();
                    engine.dp_group().barrier()?;
                    engine.sp_group().barrier()?;
                    Ok::<_, anyhow::Error>(live_bytes())
                };
                // Memory that persists between steps (thread-local scratch, exchange plans) exists after one
                // step.
                let before = step()?;
                Ok(step()? - before)
            });
            // The slots of an operation may be allocated by one rank and freed by another: a few kilobytes
            // per rank, nothing in total.
            let label = format!("{dp}x{sp} stage {stage}: ranks grew by {grown:?}");
            assert!(grown.iter().all(|bytes| bytes.unsigned_abs() < LAYER as u64 / 16), "{label}");
            assert!(grown.iter().sum::<i64>().unsigned_abs() < 4 << 10, "{label}");
        }
    }
}

#[test]
fn stage_3_has_at_most_two_gathered_layers_and_two_whole_gradients() {
    // Few tokens, so that activations are small compared with a layer's parameters.
    let config = config(2, 1, 3, false);
    let global = global_batch(&Batch::random(MODEL.vocab_size, 4, 4, 3)).unwrap();
    let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
        let log = Arc::new(Mutex::new(Vec::with_capacity(64)));
        let probe = |layer| {
            let log = log.clone();
            Hooked::wrap(layer, move |_| {
                log.lock().unwrap().push(live_bytes());
                Ok(())
            })
        };
        let model = Model::new(&MODEL).unwrap();
        let model = Model { layers: model.layers.into_iter().map(probe).collect(), ..model };
        let mut engine = engine(model, &RandomWeights { seed: 1 }, &config, groups)?;
        let batch = micro_batches(&global, &engine)?.remove(0);
        engine.train_batch(|| Ok::<_, DataError>(batch.clone()))?;
        engine.workspace().clear();
        log.lock().unwrap().clear();

        let before = live_bytes();
        let loss = engine.forward(&batch)?;
        let activations = loss.saved_bytes() + engine.workspace().free_bytes();
        engine.backward(loss)?;
        let held: Vec<i64> = log.lock().unwrap().iter().map(|bytes| bytes - before).collect();
        Ok((activations, held))
    });
    // Names, views, pending operations.
    let bookkeeping = LAYER / 16;
    for (rank, (activations, held)) in ranks.unwrap().into_iter().enumerate() {
        let (forward, backward) = held.split_at(MODEL.num_layers());
        // Backward: two gathered layers, the layer's own gradient, and the gradient being reduced with the
        // partition it is reduced into. A layer's backward computes as much again as its activations.
        let limits =
            [(forward, 2 * LAYER + activations), (backward, 4 * LAYER + LAYER / 2 + 2 * activations)];
        for (pass, limit) in limits {
            let limit = (limit + bookkeeping) as i64;
            assert!(pass.iter().all(|bytes| *bytes <= limit), "rank {rank}: {pass:?}, at most {limit}");
        }
        // Two layers are really gathered, so the measurement works.
        assert!(forward.iter().any(|bytes| *bytes >= 2 * LAYER as i64), "rank {rank}: {forward:?}");
    }
}

/// The peak of a step above the persistent memory, with sequences made of `documents`.
fn peak_of_step(features: serde_json::Value, sp: usize, documents: &[usize]) -> i64 {
    let json = json!({
        "train_batch_size": 2,
        "mesh_param": [1, sp],
        "activation_checkpointing": { "cpu_checkpointing": features["offload"] == true },
        "ulysses": features["ulysses"],
    });
    let config = Config::from_json_str(&json.to_string(), "test.json").unwrap();
    let global = global_batch(&Batch::packed(MODEL.vocab_size, &[documents; 2], 3)).unwrap();
    let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
        let mut engine = engine(Model::new(&MODEL)?, &Constant, &config, groups)?;
        let batch = micro_batches(&global, &engine)?.remove(0);
        engine.train_batch(|| Ok::<_, DataError>(batch.clone()))?;
        engine.workspace().clear();
        let before = live_bytes();
        reset_peak();
        engine.train_batch(|| Ok::<_, DataError>(batch.clone()))?;
        Ok(peak_bytes() - before)
    });
    ranks.unwrap().into_iter().max().unwrap()
}

#[test]
fn every_feature_lowers_the_peak_of_a_step() {
    let steps = [
        json!({ "ulysses": {} }),
        json!({ "ulysses": { "activation_checkpointing": true } }),
        json!({ "ulysses": { "activation_checkpointing": true, "tile_tokens": 64 } }),
        json!({ "ulysses": { "activation_checkpointing": true, "tile_tokens": 64 }, "offload": true }),
        json!({ "ulysses": { "activation_checkpointing": true, "tile_tokens": 64, "head_chunks": 4 },
                "offload": true }),
    ];
    for sp in [1, 2] {
        let peaks = steps.clone().map(|features| peak_of_step(features, sp, &[1024]));
        assert!(peaks.is_sorted_by(|more, less| less < more), "sp {sp}: {peaks:?}");
        // The memory of a rank's threads and its exchange does not shrink with the tokens' state.
        assert!(3 * peaks[4] < peaks[0], "sp {sp}: {peaks:?}");
    }
}

#[test]
fn packed_documents_need_as_much_memory_as_one_document() {
    let features =
        json!({ "ulysses": { "activation_checkpointing": true, "head_chunks": 2, "tile_tokens": 64 } });
    for sp in [1, 2] {
        let [dense, packed] = [&[1024][..], &[256; 4]].map(|rows| peak_of_step(features.clone(), sp, rows));
        let off = (dense - packed).abs() as f64 / dense as f64;
        assert!(off < 0.01, "sp {sp}: {dense} for one document, {packed} for four");
    }
}
