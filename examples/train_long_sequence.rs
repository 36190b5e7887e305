//! Trains a small Llama-style model on long sequences of this repository's text, on a 2 × 2 mesh
//! of ranks in one process: sequences are sharded over two ranks, optimizer state and gradients
//! partitioned over two.
//!
//! ```text
//! cargo run --release --example train_long_sequence [-- CONFIG.json]
//! ```
//!
//! `ulysses train CONFIG.json` runs the same job, with flags and files.

use anyhow::{Context, Result, bail};
use std::path::Path;
use ulysses::data::unigram_entropy_nats;
use ulysses::mesh::draw;
use ulysses::trainer::Job;

/// Counts the memory of each rank, and caches freed blocks.
#[global_allocator]
static ALLOCATOR: ulysses::memory::CountingAllocator<mimalloc::MiMalloc> =
    ulysses::memory::CountingAllocator(mimalloc::MiMalloc);

const REPOSITORY: &str = env!("CARGO_MANIFEST_DIR");

fn main() -> Result<()> {
    // 1. The job: DeepSpeed's keys, and our own section for model and data. Data paths are the repository's.
    let default = Path::new(REPOSITORY).join("configs/long_sequence.json");
    let file = std::path::absolute(std::env::args_os().nth(1).map_or(default, Into::into))?;
    std::env::set_current_dir(REPOSITORY)?;
    let mut job = Job::from_config(file)?;

    // 2. What it trains: dp × sp ranks, a model, and sequences of text as bytes.
    let prepared = job.prepared();
    let (config, sequences) = (&prepared.config, &prepared.data.phases()[0].data);
    // In a job of several processes, one of them prints.
    let is_first = job.is_first();
    let print = |text: String| {
        if is_first {
            println!("{text}");
        }
    };
    print(draw(&prepared.mesh));
    print(format!(
        "{:.2} M parameters, {} sequences of {} tokens, ZeRO stage {}, {} sequences per step\n",
        prepared.model.config.num_parameters() as f64 / 1e6,
        sequences.num_sequences(),
        sequences.seq_len(),
        u8::from(config.zero.stage),
        config.train_batch_size,
    ));
    let [source] = sequences.sources() else { bail!("this example reads data without weights") };
    let unigram_entropy = unigram_entropy_nats(source.corpus())?;

    // 3. The ranks, threads of this process; then loss, traffic and memory, compared with the formulas.
    job.show_progress();
    let summary = job.train()?.summary;
    let (_, last_loss) = summary.totals.last_loss.context("every step was skipped")?;
    print(format!("\n{}", summary.verbose()));
    print(format!(
        "byte-unigram entropy of the corpus {unigram_entropy:.4} nat; the last loss is {:.4} below it",
        unigram_entropy - last_loss
    ));
    Ok(())
}
