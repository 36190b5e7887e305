//! A task that can only be learned through attention across all shards.
//!
//! Eight needles lie at random places in a row of noise. Each says a key and a value. The last
//! eight tokens of the row ask for every key, and the answer is its value. Four ranks hold a
//! quarter of the row each; only the last one ever sees a question, so three answers in four lie
//! on another rank, and the way to them is the exchange around attention.
//!
//! To see that it is, the same model is trained again with documents that end where the shards
//! do, across which nothing can be seen: what lies in the last quarter it mostly finds, elsewhere it
//! guesses (one in eight).
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
use ulysses::model::{LlamaConfig, Model, RandomWeights, preset};

const SP: usize = 4;
const SEQ_LEN: usize = 256;
const ROWS: usize = 16;
/// Keys, and as many values.
const KEYS: usize = 8;
const STEPS: u64 = 400;
/// Distances are counted in this many classes.
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

/// Rows, and how far back the answer to each of their questions lies.
struct Haystack {
    batch: GlobalBatch,
    distances: Vec<usize>,
}

/// The same for everyone who asks with the same seed.
fn haystack(seed: u64, sees_all: bool) -> Result<Haystack, DataError> {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let (mut tokens, mut labels, mut distances) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROWS {
        let mut row: Vec<usize> = (0..SEQ_LEN - KEYS).map(|_| rng.random_range(0..NEEDLE)).collect();
        let places = rand::seq::index::sample(&mut rng, row.len(), KEYS).into_vec();
        let values: Vec<usize> = (0..KEYS).map(|_| rng.random_range(0..KEYS)).collect();
        for key in 0..KEYS {
            row[places[key]] = NEEDLE + KEYS * key + values[key];
        }
        labels.extend(vec![IGNORED_LABEL; row.len()]);
        let mut asked: Vec<usize> = (0..KEYS).collect();
        asked.shuffle(&mut rng);
        for key in asked {
            distances.push(row.len() - places[key]);
            row.push(QUESTION + key);
            labels.push((ANSWER + values[key]) as i64);
        }
        tokens.extend(row.into_iter().map(|token| token as u32));
    }
    // A document begins wherever positions start again.
    let document = if sees_all { SEQ_LEN } else { SEQ_LEN / SP };
    let positions = (0..ROWS * SEQ_LEN).map(|at| (at % document) as u32).collect();
    Ok(Haystack { batch: GlobalBatch::new(ROWS, SEQ_LEN, tokens, Some(positions), Some(labels))?, distances })
}

/// Trains, and returns the share of right answers by distance: what the last rank counts.
fn accuracies(sees_all: bool) -> Result<[f64; BINS]> {
    let config = Config::from_json_str(CONFIG, "the example's config")?;
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
    let counted = launch(mesh.world_size(), &LaunchOptions::default(), |rank: RankContext| -> Result<_> {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        // One layer is enough to look something up.
        let llama = LlamaConfig { num_layers: 1, initializer_range: 0.1, rope_theta: 1e5, ..preset("nano")? };
        let mut engine = initialize(Model::llama(&llama)?, &RandomWeights { seed: 1 }, &config, &groups)?;
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
            // Rows that were not trained on.
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
    println!("attention over whole rows:");
    let whole = accuracies(true)?;
    println!("attention within a shard:");
    let shard = accuracies(false)?;
    println!("\nright answers by distance      whole rows                      within a shard");
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
