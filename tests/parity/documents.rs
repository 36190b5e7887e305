//! Documents in training: packing a document with others does not change its loss, and ranks with different
//! sequences report it.

use crate::support::sample::{axes, sampled_every};
use serde_json::json;
use std::sync::Arc;
use ulysses::comm::thread::LaunchError;
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext, launch};
use ulysses::config::Config;
use ulysses::data::{
    Corpus, DataLoader, DataRank, GlobalBatch, IGNORED_LABEL, LoaderOptions, PackedSequence, PackedSequences,
    Packing, ReadAhead,
};
use ulysses::engine::{Engine, initialize};
use ulysses::memory::live_bytes;
use ulysses::mesh::DeviceMesh;
use ulysses::model::{FAMILIES, Family, Model, ModelConfig, RandomWeights, family, preset};
use ulysses::nn::{
    Init, LatentConfig, LinearAttentionConfig, LinearAttentionKind, Mamba2Config, MixerConfig, QkNorm,
};

const SEQ_LEN: usize = 24;
const LENS: [usize; 11] = [5, 11, 3, 24, 7, 2, 9, 19, 1, 4, 13];
const MESHES: [(usize, usize); 6] = [(1, 1), (1, 2), (1, 3), (2, 2), (4, 1), (2, 4)];

/// The first token of a document is its number, and no other token is.
fn documents() -> Vec<Vec<u32>> {
    let token = |document: usize, at: usize| (20 + (document * 37 + at * at * 11) % 230) as u32;
    let document = |(number, &len): (usize, &usize)| {
        (0..len).map(|at| if at == 0 { number as u32 } else { token(number, at) }).collect()
    };
    LENS.iter().enumerate().map(document).collect()
}

fn rows(documents: impl IntoIterator<Item = Vec<u32>>, packing: Packing) -> Vec<PackedSequence> {
    let corpus = Corpus::from_documents(documents).unwrap();
    let rows = PackedSequences::with_packing(corpus, SEQ_LEN, packing).unwrap();
    (0..rows.num_sequences()).map(|row| rows.sequence(row).unwrap()).collect()
}

/// Every document in a sequence of its own.
fn unpacked() -> Vec<PackedSequence> {
    documents().into_iter().flat_map(|document| rows([document], Packing::Greedy)).collect()
}

fn batch(rows: &[PackedSequence]) -> GlobalBatch {
    let all =
        |field: fn(&PackedSequence) -> &[u32]| rows.iter().flat_map(field).copied().collect::<Vec<u32>>();
    let labels = rows.iter().flat_map(|row| row.shift_labels.clone()).collect();
    let (ids, positions) = (all(|row| &row.input_ids), all(|row| &row.position_ids));
    GlobalBatch::new(rows.len(), SEQ_LEN, ids, Some(positions), Some(labels)).unwrap()
}

/// The sequences with the labels of one document only, and the document's number.
fn documents_alone(rows: &[PackedSequence]) -> Vec<(u32, PackedSequence)> {
    let mut alone = Vec::new();
    for row in rows {
        for bounds in row.cu_seqlens.windows(2) {
            let inside = bounds[0] as usize..bounds[1] as usize;
            let mut labels = vec![IGNORED_LABEL; SEQ_LEN];
            labels[inside.clone()].copy_from_slice(&row.shift_labels[inside.clone()]);
            if labels.iter().any(|&label| label != IGNORED_LABEL) {
                alone.push((
                    row.input_ids[inside.start],
                    PackedSequence { shift_labels: labels, ..row.clone() },
                ));
            }
        }
    }
    alone.sort_by_key(|(number, _)| *number);
    alone
}

fn on_mesh<T: Send>(
    mesh: (usize, usize),
    rows: usize,
    work: impl Fn(&mut Engine, &RankContext) -> anyhow::Result<T> + Sync,
) -> Result<Vec<T>, LaunchError> {
    with_model(&preset("nano").unwrap(), mesh, rows, work)
}

/// The blocks of a family with attention in all layers, of the sizes of `nano`.
fn of_family(family: &&'static Family) -> ModelConfig {
    let nano = ModelConfig { family, ..preset("nano").unwrap() };
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), nano.to_hf_json().to_string()).unwrap();
    ModelConfig::from_hf_dir(dir.path()).unwrap()
}

/// Layers of one branch: Mamba 2 with two groups of heads, attention and MLPs.
fn hybrid() -> ModelConfig {
    let mamba = LinearAttentionConfig {
        num_key_heads: 2,
        num_value_heads: 4,
        key_head_dim: 6,
        value_head_dim: 10,
        conv_width: 4,
        kind: LinearAttentionKind::Mamba2(Mamba2Config {
            time_step_limits: [0.001, f64::INFINITY],
            time_step_bias: Init::TimeSteps { bounds: [0.001, 0.1], floor: 1e-4 },
            conv_bias: true,
            projection_bias: false,
        }),
    };
    let nano = preset("nano").unwrap().with_num_layers(4).with_attention(|layer| layer.rope = None);
    let model = ModelConfig { family: family("nemotron_h").unwrap(), ..nano };
    model
        .with_mixer([true, false, false, false], mamba)
        .with_mixer([false, true, false, true], MixerConfig::Mlp)
}

/// Linear attention with projections by key head, and attention with a gate.
fn by_key_head() -> ModelConfig {
    let linear = LinearAttentionConfig {
        num_key_heads: 2,
        num_value_heads: 6,
        key_head_dim: 6,
        value_head_dim: 10,
        conv_width: 4,
        kind: LinearAttentionKind::GatedDeltaNet,
    };
    let nano = preset("nano").unwrap().with_attention(|layer| {
        (layer.output_gate, layer.qk_norm) = (true, Some(QkNorm::Head));
    });
    let model = ModelConfig { family: family("qwen3_next").unwrap(), norm_offset: 1.0, ..nano };
    model.with_mixer([true, false], linear)
}

/// Latent attention.
fn latent() -> ModelConfig {
    let latent = LatentConfig {
        q_rank: Some(12),
        kv_rank: 10,
        rope_head_dim: 8,
        value_head_dim: 14,
        mscale_all_dim: 0.0,
    };
    let nano = preset("nano").unwrap().with_attention(|layer| {
        (layer.num_kv_heads, layer.latent) = (layer.num_heads, Some(latent));
    });
    ModelConfig { family: family("minicpm3").unwrap(), ..nano }
}

fn with_model<T: Send>(
    model: &ModelConfig,
    (dp, sp): (usize, usize),
    rows: usize,
    work: impl Fn(&mut Engine, &RankContext) -> anyhow::Result<T> + Sync,
) -> Result<Vec<T>, LaunchError> {
    let text = json!({
        "train_batch_size": rows.next_multiple_of(dp), "mesh_param": [dp, sp], "gradient_clipping": 0.0,
        "optimizer": { "type": "SGD", "params": { "lr": 0.1 } },
    });
    let config = Config::from_json_str(&text.to_string(), "test").unwrap();
    let mesh = DeviceMesh::dp_sp(dp, sp).unwrap();
    launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let model = Model::new(model)?;
        let mut engine = initialize(model, &RandomWeights { seed: 1 }, &config, &groups)?;
        work(&mut engine, &rank)
    })
}

/// The loss of each document, by number.
fn losses_by_document(rows: &[PackedSequence], mesh: (usize, usize)) -> Vec<(u32, f64)> {
    let alone = documents_alone(rows);
    let ranks = on_mesh(mesh, 1, |engine, rank| {
        let (dp, sp) = mesh;
        let loss = |(number, row): &(u32, PackedSequence)| {
            let mut global = batch(std::slice::from_ref(row));
            global.pad_to_multiple(dp)?;
            let (dp_rank, sp_rank) = (rank.rank / sp, rank.rank % sp);
            let sum = engine.evaluate(&global.micro_batch(dp_rank..dp_rank + 1, sp, sp_rank)?)?;
            assert_eq!(sum.valid_tokens, LENS[*number as usize] as u64 - 1);
            Ok((*number, sum.sum / sum.valid_tokens as f64))
        };
        alone.iter().map(loss).collect::<anyhow::Result<Vec<_>>>()
    });
    let ranks = ranks.unwrap();
    assert!(ranks.iter().all(|losses| *losses == ranks[0]), "the ranks agree");
    ranks[0].clone()
}

#[test]
fn packed_and_unpacked_documents_have_the_same_losses_on_every_mesh() {
    let expected = losses_by_document(&unpacked(), (1, 1));
    assert_eq!(expected.len(), LENS.iter().filter(|&&len| len > 1).count());
    let packed = rows(documents(), Packing::Greedy);
    assert!(2 * packed.len() < LENS.len(), "documents share rows");
    for mesh in MESHES {
        for (kind, rows) in [("packed", &packed), ("unpacked", &unpacked())] {
            for ((number, loss), (expected_number, expected)) in
                losses_by_document(rows, mesh).into_iter().zip(&expected)
            {
                assert_eq!(number, *expected_number);
                let error = (loss - expected).abs() / expected;
                assert!(error < 1e-5, "{kind} {mesh:?}, document {number}: {loss} for {expected}");
            }
        }
    }
}

#[test]
fn packed_and_unpacked_steps_have_the_same_loss_and_gradient() {
    let step = |model: &ModelConfig, rows: &[PackedSequence], mesh: (usize, usize)| {
        let outcomes = with_model(model, mesh, rows.len(), |engine, _| {
            let mut global = batch(rows);
            global.pad_to_multiple(mesh.0)?;
            let outcome = engine.run_global_batch(&global, 1)?;
            Ok((outcome.loss, outcome.reports[0].grad_norm))
        });
        outcomes.unwrap()[0]
    };
    let packed = rows(documents(), Packing::Greedy);
    let families = FAMILIES.iter().map(of_family);
    let cases = families.flat_map(|model| MESHES.map(|mesh| (model.family.model_type, model.clone(), mesh)));
    let families = sampled_every(MESHES.len(), cases, |(family, _, mesh)| axes![family, mesh]);
    let others = [("hybrid", hybrid()), ("by key head", by_key_head()), ("latent", latent())];
    let others = others.into_iter().flat_map(|(name, model)| MESHES.map(|mesh| (name, model.clone(), mesh)));
    for (name, model, mesh) in others.chain(families) {
        let (loss, norm) = step(&model, &unpacked(), (1, 1));
        for rows in [&packed, &unpacked()] {
            let (other_loss, other_norm) = step(&model, rows, mesh);
            assert!((other_loss - loss).abs() < 1e-5 * loss, "{name} {mesh:?}: {other_loss} for {loss}");
            assert!((other_norm - norm).abs() < 1e-5 * norm, "{name} {mesh:?}: {other_norm} for {norm}");
        }
    }
}

#[test]
fn concatenated_documents_see_each_other() {
    let packed = rows(documents(), Packing::Concat);
    let ranks = on_mesh((1, 2), packed.len(), |engine, rank| {
        Ok(engine.evaluate(&batch(&packed).micro_batch(0..packed.len(), 2, rank.rank)?)?)
    });
    let sum = ranks.unwrap()[0];
    assert_eq!(sum.valid_tokens, LENS.iter().sum::<usize>() as u64 - 1, "borders are predicted too");
}

fn loader(rank: DataRank, seed: u64) -> DataLoader {
    let corpus = Corpus::from_documents(documents()).unwrap();
    let rows = Arc::new(PackedSequences::new(corpus, SEQ_LEN).unwrap());
    DataLoader::new(rows, LoaderOptions { seed, micro_batch: 2, accumulation: 1, rank }).unwrap()
}

#[test]
fn sp_ranks_with_shards_of_different_sequences_are_named() {
    let mesh = DeviceMesh::dp_sp(2, 3).unwrap();
    for evaluates in [false, true] {
        let error = on_mesh((2, 3), 4, |engine, rank| {
            // Rank 4 is the second of the second sp group.
            let seed = if rank.rank == 4 { 2 } else { 1 };
            let mut loader = loader(DataRank::on_mesh(&mesh, rank.rank)?, seed);
            if evaluates {
                engine.evaluate(&loader.next_micro_batch()?)?;
            } else {
                engine.train_batch(|| loader.next_micro_batch())?;
            }
            Ok(())
        });
        let error = format!("{:#}", anyhow::Error::from(error.unwrap_err()));
        assert!(
            error.contains("rank 4 holds shards of other sequences than rank 3 of its sp group"),
            "{error}"
        );
    }
}

#[test]
fn a_rank_with_another_last_step_is_named() {
    let run = |last_step_of_rank_4: u64| {
        on_mesh((2, 3), 4, |engine, rank| {
            let last_step = if rank.rank == 4 { last_step_of_rank_4 } else { 7 };
            Ok(engine.check_agreement(&[("the seed", 1), ("the last step", last_step)])?)
        })
    };
    run(7).unwrap();
    let error = format!("{:#}", anyhow::Error::from(run(8).unwrap_err()));
    assert!(error.contains("the last step differs between rank 4 and rank"), "{error}");
}

#[test]
fn batches_that_are_read_ahead_do_not_count_as_the_rank_s_memory() {
    let mut ahead = ReadAhead::new(loader(DataRank::single(), 1));
    drop(ahead.next_micro_batch().unwrap());
    let before = live_bytes();
    for _ in 0..100 {
        drop(ahead.next_micro_batch().unwrap());
    }
    // A channel keeps less than one batch of 16 bytes per token to wake a waiting thread.
    let drift = live_bytes() - before;
    assert!(drift.abs() < 2 * SEQ_LEN as i64 * 16, "{drift} bytes after 100 batches");
}
