//! `ulysses train`.

mod checkpoints;
mod host;
mod output;
mod prepare;
mod reporter;
mod signals;

use super::{DeviceArg, Failure, OrFail, note, print};
use anyhow::Context;
use candle_core::Device;
use checkpoints::Checkpoints;
use clap::ValueEnum;
use host::Host;
use reporter::Reporter;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use ulysses::checkpoint::OutputLock;
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext, launch};
#[cfg(feature = "nccl")]
use ulysses::config::Backend;
use ulysses::config::Config;
use ulysses::data::{DataLoader, LoaderOptions, PackedRows, Placement};
use ulysses::device::DeviceKind;
use ulysses::engine::initialize;
use ulysses::mesh::DeviceMesh;
use ulysses::model::{LlamaConfig, Model, WeightSource};
use ulysses::monitor::{RankSummary, RunSummary, RunTotals};

#[derive(clap::Args)]
pub(super) struct TrainArgs {
    /// DeepSpeed-style JSON config. Flags override what it says.
    config: PathBuf,
    /// Preset (nano, tiny, small, base), or directory with config.json and model.safetensors.
    /// A directory named like a preset is `./NAME`.
    #[arg(long)]
    model: Option<String>,
    /// Text file or directory.
    #[arg(long)]
    data: Option<String>,
    /// Hugging Face tokenizer.json; without it the one in the model's directory, or bytes.
    #[arg(long)]
    tokenizer: Option<String>,
    /// Ranks: `DPxSP` or `dp=2,sp=2`. Must not contradict the config.
    #[arg(long, allow_hyphen_values = true)]
    mesh: Option<String>,
    /// Tokens in a row, over all sp ranks.
    #[arg(long, allow_negative_numbers = true)]
    seq_len: Option<usize>,
    /// Optimizer steps.
    #[arg(long, allow_negative_numbers = true)]
    steps: Option<u64>,
    /// CPU threads of each rank; a fair share of the cores without it.
    #[arg(long, allow_negative_numbers = true)]
    threads_per_rank: Option<usize>,
    /// Where the ranks' tensors are: each rank has a GPU, or shares one.
    #[arg(long, default_value = "cpu")]
    device: DeviceArg,
    /// What carries the communication.
    #[arg(long)]
    backend: Option<BackendArg>,
    /// Directory for metrics.jsonl and the resolved config; `runs/NAME-N` without it.
    #[arg(long)]
    output: Option<String>,
    /// Go on from the newest sound checkpoint of the output directory, or from the given one.
    #[arg(long, value_name = "STEP_DIR", num_args = 0..=1, require_equals = true)]
    resume: Option<Option<PathBuf>>,
    /// Seed of the initial weights and of the order of the data.
    #[arg(long, allow_negative_numbers = true)]
    seed: Option<u64>,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendArg {
    /// Ranks are threads of this process.
    Thread,
    /// The same, each with a GPU of its own and NCCL between them (feature `nccl`).
    Nccl,
    /// Ranks are processes that `mpirun` has started (feature `mpi`).
    Mpi,
}

/// What `--resume` asks for.
enum Resume {
    /// The newest checkpoint of the output directory that verifies.
    Newest,
    /// The checkpoint in this directory.
    From(PathBuf),
}

/// Everything that the ranks share.
struct Run {
    config: Config,
    mesh: DeviceMesh,
    launch: LaunchOptions,
    device: DeviceKind,
    llama: LlamaConfig,
    weights: Box<dyn WeightSource>,
    rows: Arc<PackedRows>,
    steps: u64,
    output: PathBuf,
    resume: Option<Resume>,
    /// Name of the run, unless it resumes one.
    new_run_id: String,
    /// Set by a signal: save and end.
    stop: Arc<AtomicBool>,
    /// Held, by the process that writes to `output`, while the run lasts.
    _lock: Option<OutputLock>,
}

/// What a rank ends with.
#[derive(Serialize, Deserialize)]
struct RankOutcome {
    /// On rank 0.
    totals: Option<RunTotals>,
    summary: RankSummary,
    last_step: u64,
    stopped: bool,
}

pub(super) fn run(args: TrainArgs) -> Result<(), Failure> {
    let mut host = Host::default();
    let prepared = prepare::prepare(args, &mut host);
    let run = host.agree(prepared)?;
    note(&run);
    let results = host.launch(&run)?;
    let ranks = results.iter().map(|outcome| outcome.summary.clone()).collect();
    let first = results.into_iter().next().context("a mesh has a rank").or_run()?;
    let (step, totals) = (first.last_step, first.totals.context("rank 0 reports").or_run()?);
    if totals.steps == 0 {
        return print(format_args!("nothing to do: step {step} of {} is done\n", run.steps));
    }
    let summary = RunSummary { totals, ranks };
    print(format_args!("{summary}\nmetrics     {}\n", run.output.join("metrics.jsonl").display()))?;
    if first.stopped { Err(Failure::Stopped { step }) } else { Ok(()) }
}

impl Run {
    /// Trains on the ranks that are threads of this process.
    fn launch(&self) -> Result<Vec<RankOutcome>, Failure> {
        let world_size = self.mesh.world_size();
        match self.config.backend {
            #[cfg(feature = "nccl")]
            Backend::Nccl => {
                let gpus: Vec<usize> = (0..world_size).collect();
                ulysses::comm::nccl::launch(&gpus, &self.launch, |rank| {
                    let gpu = rank.group.value_device();
                    self.train(&rank, gpu)
                })
                .or_run()
            }
            _ => launch(world_size, &self.launch, |rank| self.train(&rank, self.device.open(rank.rank)?))
                .or_run(),
        }
    }

    fn train(&self, rank: &RankContext, device: Device) -> anyhow::Result<RankOutcome> {
        let groups = MeshGroups::new(&self.mesh, rank.group.clone())?.on(device);
        let mut engine = initialize(Model::llama(&self.llama)?, &*self.weights, &self.config, &groups)?;
        let options = LoaderOptions {
            seed: self.config.seed,
            micro_batch: self.config.micro_batch_size,
            accumulation: self.config.gradient_accumulation_steps,
            placement: Placement::of(&self.mesh, rank.rank)?,
        };
        let mut loader = DataLoader::new(self.rows.clone(), options)?;
        let mut checkpoints = Checkpoints::new(self, &groups, &engine)?;
        checkpoints.resume(&mut engine, &mut loader)?;
        let first_step = engine.attempted_steps();
        let mut reporter = (rank.rank == 0).then(|| Reporter::new(self, first_step)).transpose()?;
        let mut stopped = false;
        while engine.attempted_steps() < self.steps && !stopped {
            let start = Instant::now();
            let report = engine.train_batch(|| loader.next_micro_batch())?;
            if let Some(reporter) = &mut reporter {
                reporter.record(&report.metrics(start.elapsed().as_secs_f64()))?;
            }
            stopped = checkpoints.after_step(&mut engine, &loader)?;
        }
        engine.check_replicas()?;
        let last_step = engine.attempted_steps();
        let micro_batches = (last_step - first_step) * self.config.gradient_accumulation_steps as u64;
        let summary = engine.summary(&self.llama, self.rows.seq_len(), micro_batches)?;
        let totals = reporter.map(|reporter| reporter.totals);
        Ok(RankOutcome { totals, summary, last_step, stopped })
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Config { dp_size, sp_size, zero_stage, .. } = &self.config;
        write!(
            f,
            "mesh dp {dp_size} × sp {sp_size}, ZeRO stage {}, {:.2} M parameters, {} rows of {} tokens, \
             {} thread(s) per rank",
            u8::from(*zero_stage),
            self.llama.num_parameters() as f64 / 1e6,
            self.rows.num_rows(),
            self.rows.seq_len(),
            self.launch.threads_per_rank,
        )
    }
}
