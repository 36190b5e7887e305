//! A task that can only be learned through attention across all shards.
//!
//! Eight needles are at random positions in a sequence of noise; each is a key and a value. The
//! last eight tokens of the sequence ask for every key, and the answer is its value. Each of four
//! ranks has a quarter of the sequence. Only the last one has the questions, so three of four
//! answers are on another rank, and only the exchange around attention can find them.
//!
//! For comparison, the same model is trained with documents that end where the shards end, so
//! that attention stays within a shard. It mostly finds the answers in the last quarter, and
//! guesses the others (one in eight).
//!
//! ```text
//! cargo run --release --example 09_needle_in_a_haystack [-- PICTURE.svg]
//! ```

mod picture;

use anyhow::{Context, Result};
use candle_core::D;
use rand::{Rng, SeedableRng, seq::SliceRandom};
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext, launch};
use ulysses::config::Config;
use ulysses::data::{DataError, GlobalBatch, IGNORED_LABEL};
use ulysses::engine::initialize;
use ulysses::mesh::DeviceMesh;
use ulysses::model::{Model, ModelConfig, RandomWeights, preset};

const SP: usize = 4;
const SEQ_LEN: usize = 256;
const BATCH_SIZE: usize = 16;
/// Number of keys, and of values.
const KEYS: usize = 8;
const STEPS: u64 = 400;
/// Number of distance classes.
const BINS: usize = 16;

// Tokens: noise, needles (a key and a value in one), questions, answers.
const NEEDLE: usize = 16;
const QUESTION: usize = NEEDLE + KEYS * KEYS;
const ANSWER: usize = QUESTION + KEYS;

const CONFIG: &str = r#"{
    "train_batch_size": 16, "mesh_param": [1, 4], "gradient_clipping": 1.0,
    "optimizer": { "type": "AdamW", "params": { "lr": 6e-3, "betas": [0.9, 0.95] } },
    "scheduler": { "type": "WarmupCosineLR", "params": { "total_num_steps": 400, "warmup_num_steps": 20 } }
}"#;

/// A batch, and the distance from each question back to its answer.
struct Haystack {
    batch: GlobalBatch,
    distances: Vec<usize>,
}

/// Generates a batch, equal on all ranks with the same seed.
fn haystack(seed: u64, sees_all: bool) -> Result<Haystack, DataError> {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let (mut tokens, mut labels, mut distances) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..BATCH_SIZE {
        let mut sequence: Vec<usize> = (0..SEQ_LEN - KEYS).map(|_| rng.random_range(0..NEEDLE)).collect();
        let places = rand::seq::index::sample(&mut rng, sequence.len(), KEYS).into_vec();
        let values: Vec<usize> = (0..KEYS).map(|_| rng.random_range(0..KEYS)).collect();
        for key in 0..KEYS {
            sequence[places[key]] = NEEDLE + KEYS * key + values[key];
        }
        labels.extend(vec![IGNORED_LABEL; sequence.len()]);
        let mut asked: Vec<usize> = (0..KEYS).collect();
        asked.shuffle(&mut rng);
        for key in asked {
            distances.push(sequence.len() - places[key]);
            sequence.push(QUESTION + key);
            labels.push((ANSWER + values[key]) as i64);
        }
        tokens.extend(sequence.into_iter().map(|token| token as u32));
    }
    // A document begins wherever positions start again.
    let document = if sees_all { SEQ_LEN } else { SEQ_LEN / SP };
    let positions = (0..BATCH_SIZE * SEQ_LEN).map(|at| (at % document) as u32).collect();
    Ok(Haystack {
        batch: GlobalBatch::new(BATCH_SIZE, SEQ_LEN, tokens, Some(positions), Some(labels))?,
        distances,
    })
}

/// Trains, and returns the share of right answers by distance: what the last rank counts.
fn accuracies(sees_all: bool) -> Result<[f64; BINS]> {
    let config = Config::from_json_str(CONFIG, "the example's config")?;
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
    let counted = launch(mesh.world_size(), &LaunchOptions::default(), |rank: RankContext| -> Result<_> {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        // One layer is enough to look something up.
        let one_layer = preset("nano")?.with_num_layers(1).with_rope(|rope| rope.theta = 1e5);
        let llama = ModelConfig { initializer_range: 0.1, ..one_layer };
        let mut engine = initialize(Model::new(&llama)?, &RandomWeights { seed: 1 }, &config, &groups)?;
        for step in 0..STEPS {
            // This rank's tokens of every sequence, for each micro step.
            let mut shards = engine.shard(&haystack(step, sees_all)?.batch)?.into_iter();
            let report = engine.train_batch(|| shards.next().context("a step has one micro batch"))?;
            if rank.rank == 0 && report.step % 100 == 0 {
                println!("  step {:3}  loss {:.4}", report.step, report.loss);
            }
        }
        let (mut right, mut asked) = ([0.0; BINS], [0.0; BINS]);
        for seed in 0..20 {
            // Sequences that were not trained on.
            let Haystack { batch, distances } = haystack(u64::MAX - seed, sees_all)?;
            let shard = engine.shard(&batch)?.swap_remove(0);
            let predicted = engine.logits(&shard)?.argmax(D::Minus1)?.flatten_all()?.to_vec1::<u32>()?;
            let is_question = |(_, label): &(&u32, &i64)| **label != IGNORED_LABEL;
            let answers = predicted.iter().zip(&shard.labels).filter(is_question);
            for ((predicted, label), distance) in answers.zip(&distances) {
                let bin = (distance - 1) * BINS / SEQ_LEN;
                asked[bin] += 1.0;
                right[bin] += f64::from(u8::from(i64::from(*predicted) == *label));
            }
        }
        Ok(std::array::from_fn(|bin| right[bin] / f64::max(asked[bin], 1.0)))
    })?;
    counted.into_iter().next_back().context("a mesh has a rank")
}

fn main() -> Result<()> {
    println!("attention over whole sequences:");
    let whole = accuracies(true)?;
    println!("attention within a shard:");
    let shard = accuracies(false)?;
    println!("\nright answers by distance      whole sequences                 within a shard");
    let bar =
        |share: f64| format!("{:3.0} % {:<25}", share * 100.0, "█".repeat((share * 24.0).round() as usize));
    for (bin, (whole, shard)) in whole.iter().zip(&shard).enumerate() {
        let width = SEQ_LEN / BINS;
        println!("{:>7} – {:<4}  {} {}", bin * width + 1, (bin + 1) * width, bar(*whole), bar(*shard));
    }
    if let Some(path) = std::env::args_os().nth(1) {
        std::fs::write(path, picture::picture(&whole, &shard))?;
    }
    Ok(())
}
