//! Flexible sequence parallelism: the ranks that compute a document never change the math.

use crate::support::compare::assert_all_close;
use crate::support::mesh_run::by_name;
use anyhow::Result;
use candle_core::Tensor;
use serde_json::{Value, json};
use std::sync::Arc;
use ulysses::comm::{LaunchOptions, MeshGroups, launch};
use ulysses::config::Config;
use ulysses::data::{Corpus, IGNORED_LABEL, PackedSequences, Packing, Tokenizer};
use ulysses::engine::{Engine, initialize};
use ulysses::memory::peak_bytes;
use ulysses::mesh::DeviceMesh;
use ulysses::model::{Model, ModelConfig, RandomWeights, family, preset};
use ulysses::nn::{LinearAttentionConfig, LinearAttentionKind, MixerConfig, QkNorm};

const SEQ_LEN: usize = 45;
const MESHES: [(usize, usize); 5] = [(1, 2), (1, 4), (2, 2), (1, 8), (2, 4)];

/// Loss, norm and tokens of each step, and the parameters after the last.
#[derive(Debug)]
struct Run {
    steps: Vec<(f64, f64, u64)>,
    label_tokens: Vec<u64>,
    parameters: Vec<(String, Tensor)>,
    /// Numbers of ranks that shared a micro batch of some rank.
    block_sizes: Vec<usize>,
}

/// Documents with lengths from a log-normal distribution, rounded; some longer than a sequence.
const LENS: [usize; 36] = [
    3, 17, 8, 1, 45, 6, 12, 4, 90, 2, 9, 31, 5, 7, 14, 60, 3, 11, 22, 6, 8, 4, 38, 5, 10, 2, 19, 7, 44, 13,
    6, 9, 3, 27, 16, 8,
];

/// Without `masks`, every token has a label.
fn data(packing: Packing, masks: bool) -> Result<Arc<PackedSequences>> {
    let token = |document: usize, at: usize| ((document * 37 + at * at * 11 + at) % 250 + 1) as u32;
    let tokens =
        |(document, &len): (usize, &usize)| (0..len).map(|at| token(document, at)).collect::<Vec<u32>>();
    let documents = LENS.iter().enumerate().map(tokens);
    let corpus = match masks {
        false => Corpus::from_documents(documents)?,
        true => {
            let line = |ids: Vec<u32>| {
                let label = |(at, &id): (usize, &u32)| if at % 5 < 2 { IGNORED_LABEL } else { i64::from(id) };
                let labels: Vec<i64> = ids.iter().enumerate().map(label).collect();
                json!({ "input_ids": ids, "labels": labels }).to_string()
            };
            let root = tempfile::tempdir()?;
            let path = root.path().join("masked.jsonl");
            std::fs::write(&path, documents.map(line).collect::<Vec<_>>().join("\n"))?;
            Corpus::load(&path, &Tokenizer::bytes())?
        }
    };
    Ok(Arc::new(PackedSequences::with_packing(corpus, SEQ_LEN, packing)?))
}

/// The preset `nano` with eight heads and two KV heads.
fn model() -> Result<ModelConfig> {
    Ok(preset("nano")?.with_attention(|layer| {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (8, 2, 8);
    }))
}

fn config((dp, sp): (usize, usize), stage: u8, flexible: bool, extra: &Value) -> Result<Config> {
    let mut value = json!({
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "mesh_param": [dp, sp], "seed": 7,
        "zero_optimization": { "stage": stage }, "gradient_clipping": 0.5,
        "optimizer": { "type": "SGD", "params": { "lr": 0.1 } },
        "ulysses": { "seq_len": SEQ_LEN, "flexible_sp": flexible },
    });
    for (key, extra) in extra.as_object().into_iter().flatten() {
        match (value.get_mut(key).and_then(Value::as_object_mut), extra.as_object()) {
            (Some(section), Some(keys)) => section.extend(keys.clone()),
            _ => value[key] = extra.clone(),
        }
    }
    Ok(Config::from_json_str(&value.to_string(), "test.json")?)
}

/// Runs `work` with an engine on every rank; returns the result of the first one.
fn on_mesh<T: Send>(
    (model, config): (&ModelConfig, &Config),
    work: impl Fn(&mut Engine, usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
    Ok(launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let mut engine = initialize(Model::new(model)?, &RandomWeights { seed: 1 }, config, &groups)?;
        work(&mut engine, rank.rank)
    })?)
}

/// Trains three steps of the usual model.
fn run(config: &Config, data: &Arc<PackedSequences>) -> Result<Run> {
    run_model(&model()?, config, data)
}

/// Trains three steps.
fn run_model(model: &ModelConfig, config: &Config, data: &Arc<PackedSequences>) -> Result<Run> {
    let runs = on_mesh((model, config), |engine, _| {
        let mut loader = engine.data_loader(data.clone())?;
        let (mut steps, mut label_tokens, mut block_sizes) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..3 {
            let report = engine.train_batch(|| {
                let batch = loader.next_micro_batch();
                block_sizes.extend(batch.iter().filter_map(|batch| Some(batch.flexible?.block_size)));
                batch
            })?;
            steps.push((report.loss, report.grad_norm, report.tokens));
            label_tokens.push(report.label_tokens);
        }
        engine.check_replicas()?;
        Ok(Run { steps, label_tokens, parameters: engine.gather_parameters()?, block_sizes })
    })?;
    let block_sizes = runs.iter().flat_map(|run| run.block_sizes.clone()).collect();
    let first = runs.into_iter().next().expect("a mesh has a rank");
    Ok(Run { block_sizes, ..first })
}

#[track_caller]
fn assert_equal(got: &Run, expected: &Run, tolerance: f64, label: &str) {
    assert_eq!(got.label_tokens, expected.label_tokens, "{label}");
    for (got, expected) in got.steps.iter().zip(&expected.steps) {
        assert!(
            (got.0 - expected.0).abs() <= tolerance * expected.0,
            "{label}: loss {} for {}",
            got.0,
            expected.0
        );
        assert!(
            (got.1 - expected.1).abs() <= tolerance * expected.1,
            "{label}: norm {} for {}",
            got.1,
            expected.1
        );
        assert_eq!(got.2, expected.2, "{label}: tokens");
    }
    assert_all_close(
        &format!("{label}: parameter"),
        &by_name(&got.parameters),
        &by_name(&expected.parameters),
        tolerance,
    );
}

/// Compares a flexible run on every mesh, at rotating stages, with a single rank and with the fixed layout.
fn check(packing: Packing, masks: bool, extra: &Value, meshes: &[(usize, usize)]) -> Vec<usize> {
    let data = data(packing, masks).unwrap();
    let alone = run(&config((1, 1), 0, false, extra).unwrap(), &data).unwrap();
    let mut block_sizes = Vec::new();
    for (stage, &mesh) in (0..).zip(meshes) {
        let stage = stage % 4;
        let fixed = run(&config(mesh, stage, false, extra).unwrap(), &data).unwrap();
        let flexible = run(&config(mesh, stage, true, extra).unwrap(), &data).unwrap();
        let label = format!("{packing:?}, {mesh:?}, stage {stage}, {extra}");
        assert_equal(&flexible, &alone, 2e-5, &format!("{label}, against one rank"));
        assert_equal(&flexible, &fixed, 2e-5, &format!("{label}, against the fixed layout"));
        assert!(fixed.block_sizes.is_empty());
        block_sizes.extend(flexible.block_sizes);
    }
    block_sizes.sort_unstable();
    block_sizes.dedup();
    block_sizes
}

#[test]
fn documents_on_any_number_of_ranks_have_the_loss_gradient_and_update_of_the_fixed_layout() {
    let sizes = check(Packing::Greedy, false, &json!({}), &MESHES);
    assert_eq!(sizes, [1, 2, 4, 8], "blocks of all sizes occur");
}

#[test]
fn cut_and_concatenated_documents_and_masked_labels_train_the_same() {
    check(Packing::Cut, false, &json!({}), &[(1, 3), (2, 2)]);
    check(Packing::Concat, false, &json!({}), &[(1, 4)]);
    check(Packing::Greedy, true, &json!({}), &[(2, 3), (2, 2), (1, 6), (2, 4)]);
}

#[test]
fn partitions_over_sp_recomputation_and_head_chunks_train_the_same_with_flexible_sp() {
    let meshes = [(1, 2), (2, 2), (1, 2), (2, 2)];
    for ulysses in [
        json!({ "zero_partition_axes": ["dp", "sp"] }),
        json!({ "activation_checkpointing": true, "head_chunks": 2, "overlap_exchange": true, "tile_tokens": 5 }),
    ] {
        check(Packing::Greedy, false, &json!({ "ulysses": ulysses }), &meshes);
    }
}

#[test]
fn linear_attention_sees_whole_documents_with_flexible_sp_also_if_states_are_passed_on() {
    let mut hybrid = model().unwrap();
    let linear = LinearAttentionConfig {
        num_key_heads: 1,
        num_value_heads: 3,
        key_head_dim: 8,
        value_head_dim: 8,
        conv_width: 4,
        kind: LinearAttentionKind::GatedDeltaNet,
    };
    hybrid.layers[0] = MixerConfig::LinearAttention(linear);
    let hybrid = ModelConfig { family: family("qwen3_5_text").unwrap(), norm_offset: 1.0, ..hybrid };
    let hybrid =
        hybrid.with_attention(|layer| (layer.output_gate, layer.qk_norm) = (true, Some(QkNorm::Head)));
    let data = data(Packing::Greedy, false).unwrap();
    let with = |mesh, flexible, passes_states: bool| {
        let extra = json!({ "ulysses": { "state_passing": passes_states } });
        run_model(&hybrid, &config(mesh, 1, flexible, &extra).unwrap(), &data).unwrap()
    };
    let alone = with((1, 1), false, false);
    let meshes = [((2, 2), false), ((1, 4), false), ((2, 2), true), ((1, 4), true), ((1, 6), true)];
    for (mesh, passes_states) in meshes {
        let context = format!("{mesh:?}, states passed: {passes_states}");
        assert_equal(&with(mesh, true, passes_states), &alone, 2e-5, &context);
    }
}

#[test]
fn larger_micro_batches_are_larger_budgets() {
    check(Packing::Greedy, false, &json!({ "train_micro_batch_size_per_gpu": 2 }), &[(1, 4), (2, 2)]);
}

#[test]
fn bf16_trains_the_same_with_flexible_sp_up_to_its_rounding() {
    let data = data(Packing::Greedy, false).unwrap();
    let half = json!({ "bf16": { "enabled": true } });
    let [fixed, flexible] =
        [false, true].map(|flexible| run(&config((2, 2), 1, flexible, &half).unwrap(), &data).unwrap());
    for (fixed, flexible) in fixed.steps.iter().zip(&flexible.steps) {
        // 8 bits of mantissa.
        assert!((fixed.0 - flexible.0).abs() < 4e-3 * fixed.0, "{fixed:?}, {flexible:?}");
        assert!((fixed.1 - flexible.1).abs() < 2e-2 * fixed.1, "{fixed:?}, {flexible:?}");
    }
}

#[test]
fn memory_is_at_most_that_of_the_fixed_layout() {
    let data = data(Packing::Greedy, false).unwrap();
    let peak = |flexible: bool| {
        let config = config((1, 2), 0, flexible, &json!({})).unwrap();
        let peaks = on_mesh((&model().unwrap(), &config), |engine, _| {
            let mut loader = engine.data_loader(data.clone())?;
            for _ in 0..6 {
                engine.train_batch(|| loader.next_micro_batch())?;
            }
            Ok(peak_bytes())
        });
        peaks.unwrap().into_iter().max().unwrap()
    };
    let (fixed, flexible) = (peak(false), peak(true));
    // The list of the step's documents, and rows that are read whole before they are sharded.
    assert!(flexible < fixed + fixed / 50, "{flexible} bytes for {fixed}");
}

#[test]
fn a_rank_with_another_assignment_is_named_before_any_rank_waits() {
    let data = data(Packing::Greedy, false).unwrap();
    let config = config((2, 2), 0, true, &json!({})).unwrap();
    let error = on_mesh((&model().unwrap(), &config), |engine, rank| {
        let mut loader = engine.data_loader(data.clone())?;
        if rank == 2 {
            loader.set_samples_consumed(1);
        }
        engine.train_batch(|| loader.next_micro_batch())?;
        Ok(())
    });
    let error = format!("{:#}", error.unwrap_err());
    assert!(
        error.contains("the assignment of documents to ranks (ulysses.flexible_sp) differs between rank"),
        "{error}"
    );
}

#[test]
fn rings_and_means_of_micro_batches_are_refused_with_flexible_sp() {
    let refused = |extra: Value, expected: &[&str]| {
        let error = config((1, 4), 0, true, &extra).unwrap_err().to_string();
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
    };
    refused(json!({ "ulysses": { "ring_size": 2 } }), &["`ulysses.flexible_sp`", "use no ring"]);
    refused(
        json!({ "loss_normalization": "micro_batch" }),
        &["flexible_sp", "`loss_normalization` is \"global\""],
    );
}
