//! `ulysses train`.

mod agreement;
mod checkpoints;
mod feed;
mod host;
mod memory;
mod monitors;
mod output;
mod peak;
mod prepare;
mod profile;
mod record;
mod reporter;
mod resume;
mod signals;
mod stragglers;
mod trace;

use super::evaluation::evaluate;
use super::process::WorldArgs;
use super::{DeviceArg, Failure, OrFail, data, note, print};
use anyhow::Context;
use candle_core::Device;
use checkpoints::Checkpoints;
use clap::ValueEnum;
use feed::{Feed, Limit, Phase};
use host::Host;
use memory::{MemoryWatch, StepMemory};
use reporter::{Reported, Reporter};
use resume::Resume;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use stragglers::Stragglers;
use ulysses::checkpoint::{CheckpointError, OutputLock};
use ulysses::comm::{CollectiveOp, LaunchError, LaunchOptions, MeshGroups, RankContext, launch};
use ulysses::config::{Backend, Config, Packing, ParameterGroup, RawConfig};
use ulysses::data::Placement;
use ulysses::device::DeviceKind;
use ulysses::engine::plan::{PlannedCalls, RankStep};
use ulysses::engine::{Engine, StepTimes, initialize};
use ulysses::memory::peak_bytes;
use ulysses::mesh::{Cluster, DeviceMesh};
use ulysses::model::{LlamaConfig, Model, WeightSource};
use ulysses::monitor::{
    CommsTable, EvalMetrics, Metrics, PlannedVolume, RankComms, RankSummary, RunSummary, Traced, Tracer,
};

#[derive(clap::Args, Clone)]
pub(super) struct TrainArgs {
    /// DeepSpeed-style JSON config. Flags override what it says.
    config: PathBuf,
    /// Preset (nano, tiny, small, base), or directory with config.json and model.safetensors.
    /// A directory named like a preset is `./NAME`.
    #[arg(long)]
    model: Option<String>,
    /// A file of text, JSONL or tokens, a directory, or a pattern. Given several times, they are read one after
    /// the other.
    #[arg(long, value_name = "PATH")]
    data: Vec<String>,
    /// Documents in rows: `greedy`, `cut` or `concat`.
    #[arg(long, value_parser = data::parse_packing)]
    packing: Option<Packing>,
    /// Hugging Face tokenizer.json; without it the one in the model's directory, or bytes.
    #[arg(long)]
    tokenizer: Option<String>,
    /// Ranks: `DPxSP`, `dp=2,sp=2`, or a preset (ddp, fsdp, ulysses), by itself for the processes of a job or as
    /// `ulysses=NODESxRANKS`. Must not contradict the config.
    #[arg(long, allow_hyphen_values = true)]
    mesh: Option<String>,
    /// What the patterns of the config's `mesh_rules` are matched with; without it `HOST/cpu`, or `HOST/` and the name
    /// of the GPU. --mesh comes before any rule.
    #[arg(long, value_name = "TEXT")]
    mesh_selector: Option<String>,
    /// Tokens in a row, over all sp ranks.
    #[arg(long, allow_negative_numbers = true)]
    seq_len: Option<usize>,
    /// Optimizer steps.
    #[arg(long, allow_negative_numbers = true)]
    steps: Option<u64>,
    /// Times that the data is gone through, instead of --steps.
    #[arg(long, allow_negative_numbers = true)]
    epochs: Option<u64>,
    /// CPU threads of each rank; a fair share of the cores without it.
    #[arg(long, allow_negative_numbers = true)]
    threads_per_rank: Option<usize>,
    /// Where the ranks' tensors are: each rank has a GPU, or shares one.
    #[arg(long, default_value = "cpu")]
    device: DeviceArg,
    /// What carries the communication; without it, the config's, or what connects the processes that a launcher has
    /// started, or threads.
    #[arg(long)]
    backend: Option<BackendArg>,
    #[command(flatten)]
    world: WorldArgs,
    /// Directory for metrics.jsonl and the resolved config; `runs/NAME-N` without it.
    #[arg(long)]
    output: Option<String>,
    /// Go on from the newest sound checkpoint of the output directory, or of the run in DIR, or from the checkpoint
    /// DIR.
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true)]
    resume: Option<Option<PathBuf>>,
    /// Seed of the initial weights and of the order of the data.
    #[arg(long, allow_negative_numbers = true)]
    seed: Option<u64>,
    /// Write what all ranks do in the first steps as one timeline, for ui.perfetto.dev or chrome://tracing.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Steps that are traced.
    #[arg(long, value_name = "N", default_value_t = 5, requires = "trace", value_parser = clap::value_parser!(u64).range(1..))]
    trace_steps: u64,
}

impl TrainArgs {
    /// Where the ranks' tensors will be.
    fn rank_device(&self, backend: Option<Backend>) -> DeviceKind {
        if backend == Some(Backend::Nccl) { DeviceKind::Cuda } else { self.device.into() }
    }

    /// Whether the run goes on from a checkpoint.
    #[cfg(unix)]
    pub(super) fn resumes(&self) -> bool {
        self.resume.is_some()
    }

    /// The config of the run, as one of so many processes will have it, and the backend that file or flag states.
    #[cfg(unix)]
    pub(super) fn for_launch(&self, num_processes: usize) -> Result<(Config, Option<Backend>), Failure> {
        let raw = RawConfig::from_file(&self.config).or_usage()?;
        let cluster = Cluster { nodes: 1, ranks_per_node: num_processes };
        let backend = self.backend.map(Backend::from).or(raw.backend());
        let overrides = prepare::overrides(self.clone(), &raw, Some(cluster), self.rank_device(backend))?;
        Ok((prepare::resolve(&raw, &overrides)?, backend))
    }
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

impl From<BackendArg> for Backend {
    fn from(backend: BackendArg) -> Self {
        match backend {
            BackendArg::Thread => Self::Thread,
            BackendArg::Nccl => Self::Nccl,
            BackendArg::Mpi => Self::Mpi,
        }
    }
}

/// Everything that the ranks share.
struct Run {
    config: Config,
    mesh: DeviceMesh,
    launch: LaunchOptions,
    device: DeviceKind,
    llama: LlamaConfig,
    weights: Box<dyn WeightSource>,
    /// By ascending step, the first from the start.
    phases: Vec<Phase>,
    limit: Limit,
    /// Empty until all processes can start.
    output: PathBuf,
    resume: Option<Resume>,
    /// Name of the run, unless it resumes one.
    new_run_id: String,
    /// Set by a signal: save and end.
    stop: Arc<AtomicBool>,
    tracer: Option<Tracer>,
    /// What `run.json` says of the run before it starts.
    record: Value,
    /// Held, by the process that writes to `output`, while the run lasts.
    _lock: Option<OutputLock>,
}

/// What a rank ends with.
#[derive(Serialize, Deserialize)]
struct RankOutcome {
    /// On rank 0, if there was anything to do.
    reported: Option<Reported>,
    summary: RankSummary,
    /// Steps that were done.
    steps: u64,
    /// The number of the last step that there was to do.
    last_step: u64,
    stopped: bool,
    /// What this rank did in the steps that are traced.
    trace: Traced,
    comms: RankComms,
    /// The most that the rank held at a time; 0 where nobody counts.
    peak_bytes: u64,
    /// What it held over one step.
    step_memory: Option<StepMemory>,
    peak_flops: Option<f64>,
}

impl TrainArgs {
    /// What `--trace` asks for.
    pub(super) fn tracer(&self) -> Option<Tracer> {
        self.trace.as_ref().map(|_| Tracer::new(self.trace_steps))
    }
}

pub(super) fn run(args: TrainArgs, tracer: Option<Tracer>) -> Result<(), Failure> {
    let mut host = Host::default();
    let config_path = args.config.clone();
    let trace = args.trace.clone().zip(tracer);
    let prepared = prepare::prepare(args, &mut host);
    let mut run = host.agree(prepared)?;
    run.tracer = trace.as_ref().map(|(_, tracer)| tracer.clone());
    // Nothing is written for a run that some process cannot start.
    let written = match host.is_first() {
        true => run
            .check_places(trace.as_ref().map(|(path, _)| &**path))
            .and_then(|()| run.prepare_output(&config_path)),
        false => Ok(()),
    };
    host.agree(written)?;
    (run.output, run.new_run_id) = host.of_first((run.output, run.new_run_id))?;
    note(&run);
    let given = std::fs::read_to_string(&config_path).unwrap_or_default();
    run.record = record::begin(&run, &given);
    let results = host.launch(&run);
    let traced = trace.filter(|_| host.is_first()).map_or(Ok(()), |(path, tracer)| {
        trace::write(&path, &run.mesh, &tracer, results.as_deref().unwrap_or_default())
    });
    // Why a run failed matters more than that its trace could not be written.
    let results = results?;
    traced?;
    let first = results.first().context("a mesh has a rank").or_run()?;
    let (step, last_step, stopped) = (first.steps, first.last_step, first.stopped);
    let Some(Reported { totals, mut record }) = first.reported.clone() else {
        return print(format_args!("nothing to do: step {step} of {last_step} is done\n"));
    };
    if host.is_first() {
        record::finish(&run, &mut record, &results);
        record::write(&run.output, &record).or_run()?;
    }
    let (steps, nothing_trained) = (totals.steps, totals.last_loss.is_none());
    let comms: Vec<RankComms> = results.iter().map(|outcome| outcome.comms.clone()).collect();
    let ranks = results.into_iter().map(|outcome| outcome.summary).collect();
    print(&RunSummary { totals, ranks })?;
    print_comms(&run, &comms)?;
    let output = run.output.display();
    print(format_args!(
        "\nmetrics     {output}/metrics.jsonl; `ulysses report {output}` makes a page of them\n"
    ))?;
    if stopped {
        return Err(Failure::Stopped { step });
    }
    if nothing_trained {
        let message = format!("all {steps} steps were skipped, as said above: nothing was trained");
        return Err(Failure::Run(anyhow::anyhow!(message)));
    }
    Ok(())
}

/// The table that `comms_logger` asks for.
fn print_comms(run: &Run, ranks: &[RankComms]) -> Result<(), Failure> {
    let logger = &run.config.monitoring.comms_logger;
    if !logger.enabled {
        return Ok(());
    }
    let tells = |op: CollectiveOp| logger.tells(&op.to_string());
    print(format_args!("\n{}", CommsTable { ranks, groups: &record::groups(run), tells: &tells }))
}

/// Whose fault it is: a checkpoint that the config does not fit is the caller's.
fn failure(error: LaunchError) -> Failure {
    let error = anyhow::Error::from(error);
    let is_mismatch = |cause: &(dyn std::error::Error + 'static)| {
        matches!(cause.downcast_ref(), Some(CheckpointError::Mismatch { .. }))
    };
    if error.chain().any(is_mismatch) { Failure::Usage(error) } else { Failure::Run(error) }
}

impl Run {
    /// Whether what the run writes outside of its output directory can be written. What makes directories comes last.
    fn check_places(&self, trace: Option<&Path>) -> Result<(), Failure> {
        let monitoring = &self.config.monitoring;
        trace.map_or(Ok(()), trace::check)?;
        profile::check(&monitoring.flops_profiler)?;
        monitors::check(monitoring, None)
    }

    /// Makes the output directory and takes it for this run.
    fn prepare_output(&mut self, config_path: &Path) -> Result<(), Failure> {
        let (output, lock) = output::take(config_path, &self.config).or_run()?;
        monitors::check(&self.config.monitoring, Some(&output))?;
        (self.output, self._lock) = (output, Some(lock));
        Ok(())
    }

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
                .map_err(failure)
            }
            _ => launch(world_size, &self.launch, |rank| self.train(&rank, self.device.open(rank.rank)?))
                .map_err(failure),
        }
    }

    fn train(&self, rank: &RankContext, device: Device) -> anyhow::Result<RankOutcome> {
        let _rank = tracing::info_span!("rank", rank = rank.rank).entered();
        let groups = MeshGroups::new(&self.mesh, rank.group.clone())?.on(device);
        let mut engine = initialize(Model::llama(&self.llama)?, &*self.weights, &self.config, &groups)?;
        let mut feed = Feed::new(self, Placement::of(&self.mesh, rank.rank)?)?;
        let mut checkpoints = Checkpoints::new(self, &groups, &engine)?;
        checkpoints.resume(&mut engine, &mut feed)?;
        let first_step = engine.attempted_steps();
        let last_step = feed.last_step(first_step);
        self.check_agreement(&mut engine, last_step)?;
        let peak_flops = peak::measure(checkpoints.group(), groups.device(), self.config.precision.dtype())?;
        let reporter = || Reporter::new(self, checkpoints.run_id(), first_step..last_step, peak_flops);
        // A run that has nothing to do leaves its files as they are.
        let mut reporter = (rank.rank == 0 && first_step < last_step).then(reporter).transpose()?;
        let stragglers = Stragglers::new(&groups)?;
        let mut watch = MemoryWatch::new(self, rank.rank, groups.device().is_cpu());
        let mut stopped = false;
        while engine.attempted_steps() < last_step && !stopped {
            let (metrics, times) = step(&mut engine, &mut feed, &mut watch, &stragglers, first_step)?;
            if let Some(reporter) = &mut reporter {
                reporter.record(metrics, &times, feed.phase())?;
            }
            let evaluation = self.validate(&mut engine, &mut feed, last_step)?;
            if let (Some(reporter), Some(metrics)) = (&mut reporter, evaluation) {
                reporter.record_evaluation(&metrics)?;
            }
            stopped = checkpoints.after_step(&mut engine, &feed, last_step)?;
        }
        engine.check_replicas()?;
        let summary = engine.summary(&self.llama, feed.passes())?;
        let reported = reporter.map(|reporter| reporter.reported);
        let trace = self.tracer.as_ref().map(|tracer| tracer.take(rank.rank as u64)).unwrap_or_default();
        let comms = self.comms(&engine, &summary, &feed, rank.rank);
        Ok(RankOutcome {
            reported,
            summary,
            steps: engine.attempted_steps(),
            last_step,
            stopped,
            trace,
            comms,
            peak_bytes: u64::try_from(peak_bytes()).unwrap_or(0),
            step_memory: watch.kept(),
            peak_flops,
        })
    }

    /// What this rank's collectives were, and what was planned of the training steps.
    fn comms(&self, engine: &Engine, summary: &RankSummary, feed: &Feed<'_>, rank: usize) -> RankComms {
        let sent = summary.groups.iter().flat_map(|(axis, stats)| {
            stats.ops.iter().map(|(op, counted)| (axis.clone(), *op, counted.bytes_sent))
        });
        let planned = feed.passes().iter().flat_map(|passes| {
            let steps = passes.trained / self.config.gradient_accumulation_steps as u64;
            let config = Config { seq_len: Some(passes.seq_len), ..self.config.clone() };
            // What cannot be planned is told without a plan.
            let step = RankStep::of(&config, &self.llama, &self.mesh, rank).unwrap_or_default();
            step.collectives.into_iter().map(move |PlannedCalls { axis, op, purpose, sent_bytes, .. }| {
                PlannedVolume { axis, op, purpose, sent_bytes: steps * sent_bytes }
            })
        });
        RankComms {
            calls: engine.comm_calls(),
            each: engine.each_comm_call(),
            planned: planned.collect(),
            sent: sent.collect(),
        }
    }

    /// The loss of what is held out, where it is due after a step. Collective.
    fn validate(
        &self,
        engine: &mut Engine,
        feed: &mut Feed<'_>,
        last_step: u64,
    ) -> anyhow::Result<Option<EvalMetrics>> {
        let (Some(validation), Some(data)) = (&self.config.validation, &feed.phase().held_out) else {
            return Ok(None);
        };
        let step = engine.attempted_steps();
        let is_due = validation.interval.is_some_and(|interval| step.is_multiple_of(interval));
        if !is_due && step != last_step {
            return Ok(None);
        }
        let start = Instant::now();
        let max_rows =
            validation.batches.map(|batches| batches.saturating_mul(self.config.train_batch_size as u64));
        let evaluation = evaluate(engine, data, feed.placement, max_rows)?;
        feed.add_evaluated(evaluation.micro_batches);
        Ok(Some(EvalMetrics {
            step,
            eval_loss: evaluation.loss(),
            eval_perplexity: evaluation.perplexity(),
            eval_tokens: evaluation.sum.valid_tokens,
            eval_seconds: start.elapsed().as_secs_f64(),
        }))
    }
}

/// One step of one rank, in a run that began after `first_step` steps.
fn step(
    engine: &mut Engine,
    feed: &mut Feed<'_>,
    watch: &mut MemoryWatch<'_>,
    stragglers: &Stragglers,
    first_step: u64,
) -> anyhow::Result<(Metrics, StepTimes)> {
    let done = engine.attempted_steps();
    let _step = tracing::debug_span!("step", step = done + 1, done = done - first_step).entered();
    let start = Instant::now();
    if feed.begin_step(engine.attempted_steps())? {
        // Nothing of the old length is asked for again.
        engine.workspace().clear();
    }
    watch.begin(engine, feed.phase().data.seq_len());
    let report = engine.train_batch(|| feed.next_micro_batch())?;
    watch.end(engine, report.step);
    let (step_seconds, data_seconds) = (start.elapsed().as_secs_f64(), feed.take_waited());
    let times = engine.take_times();
    let time = times.shares(step_seconds, data_seconds);
    let slowest = stragglers.slowest(time.compute_seconds)?;
    let metrics = Metrics {
        data_seconds,
        padding_share: feed.phase().data.padding_share(),
        time,
        slowest_rank: slowest.rank,
        slowest_rank_ratio: slowest.ratio,
        ..report.metrics(step_seconds)
    };
    Ok((metrics, times))
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Config { dp_size, sp_size, zero_stage, parameter_groups, .. } = &self.config;
        let replicas = self.config.zero_shard_size.map_or_else(String::new, |size| {
            format!(" in {} replicas of {size} partition(s)", dp_size / size)
        });
        let is_frozen = |name: &str| ParameterGroup::is_frozen(parameter_groups, name);
        let frozen = match self.llama.num_parameters_where(is_frozen) {
            0 => String::new(),
            frozen => format!(" ({:.2} M of them frozen)", frozen as f64 / 1e6),
        };
        write!(
            f,
            "mesh dp {dp_size} × sp {sp_size}, ZeRO stage {}{replicas}, {:.2} M parameters{frozen}, {} rows of {} tokens, \
             {} thread(s) per rank",
            u8::from(*zero_stage),
            self.llama.num_parameters() as f64 / 1e6,
            self.phases[0].data.num_rows(),
            self.phases[0].data.seq_len(),
            self.launch.threads_per_rank,
        )
    }
}
