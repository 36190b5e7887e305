//! `ulysses train`.

use super::{Failure, OrFail, dp_sp, model, settings};
use anyhow::Context;
use clap::ValueEnum;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use ulysses::comm::MeshGroups;
use ulysses::comm::thread::{LaunchOptions, RankContext, launch};
use ulysses::config::{Backend, Config, Overrides, RawConfig};
use ulysses::data::{Corpus, DataLoader, LoaderOptions, PackedRows, Placement, Tokenizer};
use ulysses::engine::initialize;
use ulysses::mesh::DeviceMesh;
use ulysses::model::{LlamaConfig, Model};
use ulysses::monitor::{MetricsWriter, Progress, RankSummary, RunSummary};
use ulysses::ulysses::{AttentionShape, ExchangePlan};

#[derive(clap::Args)]
pub(super) struct TrainArgs {
    /// DeepSpeed-style JSON config. Flags override what it says.
    config: PathBuf,
    /// Preset name, or directory with config.json and model.safetensors.
    #[arg(long)]
    model: Option<String>,
    /// Text file or directory.
    #[arg(long)]
    data: Option<String>,
    /// Hugging Face tokenizer.json; bytes without it.
    #[arg(long)]
    tokenizer: Option<String>,
    /// Ranks: `DPxSP` or `dp=2,sp=2`.
    #[arg(long)]
    mesh: Option<String>,
    /// Tokens in a row, over all sp ranks.
    #[arg(long)]
    seq_len: Option<usize>,
    /// Optimizer steps.
    #[arg(long)]
    steps: Option<u64>,
    /// CPU threads of each rank; a fair share of the cores without it.
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// What carries the communication.
    #[arg(long)]
    backend: Option<BackendArg>,
    /// Directory for metrics.jsonl and the resolved config; `runs/NAME-N` without it.
    #[arg(long)]
    output: Option<String>,
    /// Seed of the initial weights and of the order of the data.
    #[arg(long)]
    seed: Option<u64>,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendArg {
    /// Ranks are threads of this process.
    Thread,
}

/// Everything that the ranks share.
struct Run {
    config: Config,
    mesh: DeviceMesh,
    llama: LlamaConfig,
    weights: Box<dyn ulysses::model::WeightSource>,
    rows: Arc<PackedRows>,
    steps: u64,
    output: PathBuf,
}

/// What rank 0 brings back besides its summary.
struct Curve {
    first_loss: f64,
    last_loss: f64,
    tokens: u64,
    seconds: f64,
}

pub(super) fn run(args: TrainArgs) -> Result<(), Failure> {
    let run = prepare(args)?;
    let world_size = run.mesh.world_size();
    let threads_per_rank = settings::threads_per_rank(run.config.threads_per_rank, world_size);
    let options = LaunchOptions { threads_per_rank, ..LaunchOptions::default() };
    eprintln!("{run}, {threads_per_rank} thread(s) per rank");
    let results = launch(world_size, &options, |rank| run.train(&rank)).or_run()?;
    let curve = results.iter().find_map(|(curve, _)| curve.as_ref()).context("rank 0 reports").or_run()?;
    let summary = RunSummary {
        steps: run.steps,
        first_loss: curve.first_loss,
        last_loss: curve.last_loss,
        tokens_per_second: curve.tokens as f64 / curve.seconds,
        seconds: curve.seconds,
        ranks: results.iter().map(|(_, summary)| summary.clone()).collect(),
    };
    println!("{summary}\nmetrics     {}", run.output.join("metrics.jsonl").display());
    Ok(())
}

/// Reads and checks everything before a rank starts.
fn prepare(args: TrainArgs) -> Result<Run, Failure> {
    let raw = RawConfig::from_file(&args.config).or_usage()?;
    let mesh = args.mesh.as_deref().map(dp_sp).transpose()?;
    let backend = args.backend.map(|BackendArg::Thread| Backend::Thread);
    let TrainArgs { model, data, tokenizer, seq_len, steps, threads_per_rank, output, seed, .. } = args;
    let overrides = Overrides {
        mesh,
        world_size: None,
        seq_len,
        steps,
        seed,
        threads_per_rank,
        model,
        data,
        tokenizer,
        output,
        backend,
    };
    let config = raw.resolve(&overrides).or_usage()?;
    config.notes.iter().for_each(|note| tracing::info!("{note}"));
    let seq_len = config.require_seq_len().or_usage()?;
    let tokenizer = match &config.tokenizer {
        Some(path) => Tokenizer::from_file(Path::new(path)).or_usage()?,
        None => Tokenizer::bytes(),
    };
    let model_name = config.require_model().or_usage()?;
    let source = model::open(model_name, config.seed, tokenizer.vocab_size())?;
    check_exchange(&config, &source.config, seq_len)?;
    let corpus = Corpus::load(Path::new(config.require_data().or_usage()?), &tokenizer).or_run()?;
    if corpus.skipped().total() > 0 {
        eprintln!("data: {}", corpus.skipped());
    }
    let rows = PackedRows::new(corpus, seq_len).or_run()?;
    rows.check_vocab(source.config.vocab_size).or_run()?;
    let output = prepare_output(&args.config, &config).or_run()?;
    Ok(Run {
        mesh: DeviceMesh::dp_sp(config.dp_size, config.sp_size).or_usage()?,
        llama: source.config,
        weights: source.weights,
        rows: Arc::new(rows),
        steps: config.require_steps().or_usage()?,
        output,
        config,
    })
}

/// Heads and tokens must go round before any rank starts.
fn check_exchange(config: &Config, llama: &LlamaConfig, seq_len: usize) -> Result<(), Failure> {
    let LlamaConfig { num_heads, num_kv_heads, head_dim, .. } = *llama;
    let batch = config.micro_batch_size;
    let shape = AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim };
    ExchangePlan::new(shape, &llama.q_to_kv(), config.sp_size, 0).or_usage()?;
    Ok(())
}

/// Makes the output directory, keeps metrics of an earlier run under another name, and
/// writes the resolved config.
fn prepare_output(config_path: &Path, config: &Config) -> anyhow::Result<PathBuf> {
    let output = match &config.output {
        Some(output) => PathBuf::from(output),
        None => {
            let name = config_path.file_stem().unwrap_or_default().to_string_lossy();
            free_name(|n| PathBuf::from("runs").join(format!("{name}-{n}")))
        }
    };
    std::fs::create_dir_all(&output).with_context(|| format!("cannot create {}", output.display()))?;
    let metrics = output.join("metrics.jsonl");
    if metrics.exists() {
        let kept = free_name(|n| output.join(format!("metrics.{n}.jsonl")));
        std::fs::rename(&metrics, &kept).with_context(|| format!("cannot rename {}", metrics.display()))?;
        eprintln!("the metrics of an earlier run are now {}", kept.display());
    }
    let resolved = output.join("config.json");
    let json = serde_json::to_string_pretty(config)?;
    std::fs::write(&resolved, json).with_context(|| format!("cannot write {}", resolved.display()))?;
    Ok(output)
}

/// The first numbered name that is not taken.
fn free_name(name: impl Fn(u32) -> PathBuf) -> PathBuf {
    (1..).map(name).find(|path| !path.exists()).unwrap_or_default()
}

impl Run {
    fn train(&self, rank: &RankContext) -> anyhow::Result<(Option<Curve>, RankSummary)> {
        let groups = MeshGroups::new(&self.mesh, rank.group.clone())?;
        let mut engine = initialize(Model::llama(&self.llama), &*self.weights, &self.config, &groups)?;
        let options = LoaderOptions {
            seed: self.config.seed,
            micro_batch: self.config.micro_batch_size,
            accumulation: self.config.gradient_accumulation_steps,
            placement: Placement::of(&self.mesh, rank.rank)?,
        };
        let mut loader = DataLoader::new(self.rows.clone(), options)?;
        let mut reporter = (rank.rank == 0).then(|| Reporter::new(self)).transpose()?;
        for _ in 0..self.steps {
            let start = Instant::now();
            let report = engine.train_batch(|| loader.next_micro_batch())?;
            if let Some(reporter) = &mut reporter {
                reporter.record(&report.metrics(start.elapsed().as_secs_f64()))?;
            }
        }
        engine.check_replicas()?;
        let micro_batches = self.steps * self.config.gradient_accumulation_steps as u64;
        let summary = engine.summary(&self.llama, self.rows.seq_len(), micro_batches)?;
        Ok((reporter.map(|reporter| reporter.curve), summary))
    }
}

/// Rank 0's metrics file, progress lines and totals.
struct Reporter {
    writer: MetricsWriter,
    progress: Progress,
    curve: Curve,
}

impl Reporter {
    fn new(run: &Run) -> anyhow::Result<Self> {
        let path = run.output.join("metrics.jsonl");
        let writer = MetricsWriter::create(&path).with_context(|| path.display().to_string())?;
        let progress = Progress::new(run.steps, run.config.steps_per_print);
        Ok(Self {
            writer,
            progress,
            curve: Curve { first_loss: 0.0, last_loss: 0.0, tokens: 0, seconds: 0.0 },
        })
    }

    fn record(&mut self, metrics: &ulysses::monitor::Metrics) -> anyhow::Result<()> {
        if metrics.step == 1 {
            self.curve.first_loss = metrics.loss;
        }
        self.curve.last_loss = metrics.loss;
        self.curve.tokens += metrics.tokens;
        self.curve.seconds += metrics.step_seconds;
        self.progress.report(metrics);
        Ok(self.writer.write(metrics)?)
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Config { dp_size, sp_size, zero_stage, .. } = &self.config;
        write!(
            f,
            "mesh dp {dp_size} × sp {sp_size}, ZeRO {zero_stage:?}, {:.2} M parameters, {} rows of {} tokens",
            self.llama.num_parameters() as f64 / 1e6,
            self.rows.num_rows(),
            self.rows.seq_len(),
        )
    }
}
