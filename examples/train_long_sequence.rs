//! Trains a small Llama-style model on long sequences of this repository's own text, on a
//! 2 × 2 mesh of ranks in one process: sequences cut in two, optimizer state and gradients
//! partitioned in two.
//!
//! ```text
//! cargo run --release --example train_long_sequence [-- CONFIG.json]
//! ```
//!
//! Read it as a tour: config, data, mesh, ranks, engine, summary. `ulysses train` is the same
//! with flags.

use anyhow::{Context, Result, bail};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext, launch};
use ulysses::config::Config;
use ulysses::data::{Corpus, PackedRows, Tokenizer, unigram_entropy_nats};
use ulysses::engine::{Passes, initialize};
use ulysses::mesh::{DeviceMesh, draw};
use ulysses::model::{LlamaConfig, Model, RandomWeights, preset};
use ulysses::monitor::{Progress, RankSummary, RunSummary, RunTotals};

/// Counts what each rank holds, and keeps freed blocks for the next allocation.
#[global_allocator]
static ALLOCATOR: ulysses::memory::CountingAllocator<mimalloc::MiMalloc> =
    ulysses::memory::CountingAllocator(mimalloc::MiMalloc);

const REPOSITORY: &str = env!("CARGO_MANIFEST_DIR");

/// What all ranks share.
struct Run {
    config: Config,
    mesh: DeviceMesh,
    model: LlamaConfig,
    rows: Arc<PackedRows>,
}

fn main() -> Result<()> {
    // 1. The config: DeepSpeed's vocabulary, and a section of our own for model and data.
    let default = Path::new(REPOSITORY).join("configs/long_sequence.json");
    let config = Config::from_file(std::env::args_os().nth(1).map_or(default, Into::into))?;

    // 2. The data: text files as bytes, packed into rows. Row order depends on the seed only.
    let tokenizer = Tokenizer::bytes();
    let [source] = config.require_data()? else { bail!("this example reads one path") };
    let data = Path::new(REPOSITORY).join(&source.path);
    let corpus = Corpus::load(&data, &tokenizer)?;
    let unigram_entropy = unigram_entropy_nats(&corpus)?;
    let rows = Arc::new(PackedRows::new(corpus, config.require_seq_len()?)?);

    // 3. The mesh: dp × sp ranks, sp neighbours next to one another.
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
    println!("{}", draw(&mesh));
    let model = LlamaConfig { vocab_size: tokenizer.vocab_size(), ..preset(config.require_model()?)? };
    println!(
        "{:.2} M parameters, {} rows of {} tokens, ZeRO stage {}, {} rows per step\n",
        model.num_parameters() as f64 / 1e6,
        rows.num_rows(),
        rows.seq_len(),
        u8::from(config.zero.stage),
        config.train_batch_size,
    );

    // 4. The ranks: threads of this process, each running `train`.
    let cores = std::thread::available_parallelism()?.get();
    let threads_per_rank = config.ulysses.threads_per_rank.unwrap_or((cores / mesh.world_size()).max(1));
    let options = LaunchOptions { threads_per_rank, ..LaunchOptions::default() };
    let run = Run { config, mesh, model, rows };
    let results = launch(run.mesh.world_size(), &options, |rank| run.train(&rank))?;

    // 5. The summary: what was learnt, moved and held, against the formulas.
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

impl Run {
    /// One rank's run: its part of the model and of every batch.
    fn train(&self, rank: &RankContext) -> Result<(RunTotals, RankSummary)> {
        let config = &self.config;
        let groups = MeshGroups::new(&self.mesh, rank.group.clone())?;
        let weights = RandomWeights { seed: config.seed };
        let mut engine = initialize(Model::llama(&self.model)?, &weights, config, &groups)?;
        let mut loader = engine.data_loader(self.rows.clone())?;

        let steps = config.require_steps()?;
        let progress = Progress::new(0..steps, config.steps_per_print);
        let mut totals = RunTotals::default();
        for _ in 0..steps {
            let start = Instant::now();
            let report = engine.train_batch(|| loader.next_micro_batch())?;
            let metrics = report.metrics(start.elapsed().as_secs_f64());
            totals.record(&metrics);
            if rank.rank == 0 {
                progress.report(&metrics);
            }
        }
        engine.check_replicas()?;
        let micro_batches = steps * config.gradient_accumulation_steps as u64;
        let passes = Passes { seq_len: self.rows.seq_len(), trained: micro_batches, evaluated: 0 };
        let summary = engine.summary(&self.model, &[passes])?;
        Ok((totals, summary))
    }
}
