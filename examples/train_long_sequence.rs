//! Trains a small Llama-style model on long sequences of this repository's text, on a 2 × 2 mesh
//! of ranks in one process: sequences are sharded over two ranks, optimizer state and gradients
//! partitioned over two.
//!
//! ```text
//! cargo run --release --example train_long_sequence [-- CONFIG.json]
//! ```
//!
//! It shows config, data, mesh, ranks, trainer and summary. `ulysses train` does the same with
//! flags.

use anyhow::{Context, Result, bail};
use std::path::Path;
use std::sync::Arc;
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext, launch};
use ulysses::config::Config;
use ulysses::data::{Corpus, PackedSequences, Tokenizer, unigram_entropy_nats};
use ulysses::engine::initialize;
use ulysses::mesh::{DeviceMesh, draw};
use ulysses::model::{Model, ModelConfig, RandomWeights, preset};
use ulysses::monitor::{Progress, RankSummary, RunSummary, RunTotals};
use ulysses::trainer::{Trainer, TrainerOptions, TrainingData};

/// Counts the memory of each rank, and caches freed blocks.
#[global_allocator]
static ALLOCATOR: ulysses::memory::CountingAllocator<mimalloc::MiMalloc> =
    ulysses::memory::CountingAllocator(mimalloc::MiMalloc);

const REPOSITORY: &str = env!("CARGO_MANIFEST_DIR");

fn main() -> Result<()> {
    // 1. The config: DeepSpeed's keys, and our own section for model and data.
    let default = Path::new(REPOSITORY).join("configs/long_sequence.json");
    let config = Config::from_file(std::env::args_os().nth(1).map_or(default, Into::into))?;

    // 2. The data: text files as bytes, packed into sequences, whose order depends only on the seed.
    let tokenizer = Tokenizer::bytes();
    let [source] = config.require_data()? else { bail!("this example reads one path") };
    let data = Path::new(REPOSITORY).join(&source.path);
    let corpus = Corpus::load(&data, &tokenizer)?;
    let unigram_entropy = unigram_entropy_nats(&corpus)?;
    let sequences = Arc::new(PackedSequences::new(corpus, config.require_seq_len()?)?);

    // 3. The mesh: dp × sp ranks; sp peers are consecutive ranks.
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
    println!("{}", draw(&mesh));
    let model = ModelConfig { vocab_size: tokenizer.vocab_size(), ..preset(config.require_model()?)? };
    println!(
        "{:.2} M parameters, {} sequences of {} tokens, ZeRO stage {}, {} sequences per step\n",
        model.num_parameters() as f64 / 1e6,
        sequences.num_sequences(),
        sequences.seq_len(),
        u8::from(config.zero.stage),
        config.train_batch_size,
    );

    // 4. The ranks: threads of this process, each running `train`.
    let cores = std::thread::available_parallelism()?.get();
    let threads_per_rank = config.ulysses.threads_per_rank.unwrap_or((cores / mesh.world_size()).max(1));
    let options = LaunchOptions { threads_per_rank, ..LaunchOptions::default() };
    let data = TrainingData::new(sequences, None)?;
    let results =
        launch(mesh.world_size(), &options, |rank| train(&rank, &config, &mesh, &model, data.clone()))?;

    // 5. The summary: loss, traffic and memory, compared with the formulas.
    let (totals, ranks): (Vec<RunTotals>, Vec<RankSummary>) = results.into_iter().unzip();
    let totals = totals.into_iter().next().context("a mesh has a rank")?;
    let (_, last_loss) = totals.last_loss.context("every step was skipped")?;
    println!("\n{}", RunSummary { totals, ranks }.verbose());
    println!(
        "byte-unigram entropy of the corpus {unigram_entropy:.4} nat; the last loss is {:.4} below it",
        unigram_entropy - last_loss
    );
    Ok(())
}

/// Trains on one rank, with its part of the model and of every batch.
fn train(
    rank: &RankContext,
    config: &Config,
    mesh: &DeviceMesh,
    model: &ModelConfig,
    data: TrainingData,
) -> Result<(RunTotals, RankSummary)> {
    let groups = MeshGroups::new(mesh, rank.group.clone())?;
    let engine = initialize(Model::llama(model)?, &RandomWeights { seed: config.seed }, config, &groups)?;
    let mut totals = RunTotals::default();
    let mut trainer = Trainer::new(engine, &groups, data, TrainerOptions::default())?;
    trainer.observe(&mut totals);
    if rank.rank == 0 {
        trainer.observe(Progress::new(trainer.steps(), config.steps_per_print));
    }
    trainer.train()?;
    let summary = trainer.engine().summary(model, trainer.data().passes())?;
    drop(trainer);
    Ok((totals, summary))
}
