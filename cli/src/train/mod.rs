//! `ulysses train`.

mod agreement;
mod args;
mod available;
mod checkpoints;
mod evaluations;
mod feed;
mod host;
mod made;
mod memory;
mod monitors;
mod outcome;
mod output;
mod peak;
mod prepare;
mod profile;
mod rank;
mod record;
mod reporter;
mod resume;
mod signals;
mod start;
mod stragglers;
mod trace;

use super::{Failure, OrFail, note};
pub(super) use args::TrainArgs;
use feed::{Limit, Phase};
use host::Host;
use made::MadeDirectories;
use rank::RankOutcome;
use resume::Resume;
use serde_json::Value;
use start::PlannedMemory;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use ulysses::checkpoint::{CheckpointError, OutputLock};
use ulysses::comm::{LaunchError, LaunchOptions, launch};
use ulysses::config::{Config, ParameterGroup};
use ulysses::device::DeviceKind;
use ulysses::mesh::DeviceMesh;
use ulysses::model::{HfSource, LlamaConfig, WeightSource};
use ulysses::monitor::Tracer;

/// Everything that the ranks share.
struct Run {
    config: Config,
    mesh: DeviceMesh,
    launch: LaunchOptions,
    device: DeviceKind,
    llama: LlamaConfig,
    weights: Box<dyn WeightSource>,
    /// Where the plan covers the model.
    planned: Option<PlannedMemory>,
    /// Of a model directory: the files that an export keeps.
    hf_source: Option<HfSource>,
    /// By ascending step, the first from the start.
    phases: Vec<Phase>,
    limit: Limit,
    /// Empty until all processes can start.
    output: PathBuf,
    resume: Option<Resume>,
    /// Whether data that is not the checkpoint's is begun from its beginning.
    reset_data: bool,
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

pub(super) fn run(args: TrainArgs, tracer: Option<Tracer>) -> Result<(), Failure> {
    let mut host = Host::default();
    let (config_path, is_verbose) = (args.config().to_owned(), args.verbose);
    let trace = args.trace.clone().zip(tracer);
    let prepared = prepare::prepare(args, &mut host);
    let mut run = host.agree(prepared)?;
    run.tracer = trace.as_ref().map(|(_, tracer)| tracer.clone());
    // Nothing is written for a run that some process cannot start.
    let written = match host.is_first() {
        true => run.take_places(&config_path, trace.as_ref().map(|(path, _)| &**path)),
        false => Ok(()),
    };
    host.agree(written)?;
    (run.output, run.new_run_id) = host.of_first((run.output, run.new_run_id))?;
    note(&run);
    run.planned.iter().for_each(|planned| planned.note(&host, &run));
    let given = std::fs::read_to_string(&config_path).unwrap_or_default();
    run.record = record::begin(&run, &given);
    let results = host.launch(&run);
    let traced = trace.filter(|_| host.is_first()).map_or(Ok(()), |(path, tracer)| {
        trace::write(&path, &run.mesh, &tracer, results.as_deref().unwrap_or_default())
    });
    // Why a run failed matters more than that its trace could not be written.
    let results = results?;
    traced?;
    outcome::report(&run, results, host.is_first(), is_verbose)
}

/// Whose fault it is: a checkpoint that the config does not fit is the caller's.
fn failure(error: LaunchError) -> Failure {
    let error = anyhow::Error::from(error);
    let is_mismatch = |cause: &(dyn std::error::Error + 'static)| {
        matches!(cause.downcast_ref(), Some(CheckpointError::Mismatch { .. }))
    };
    match error.chain().find(|cause| is_mismatch(*cause)) {
        // All ranks say so, and the cause matters more than that they cannot resume.
        Some(mismatch) => Failure::Usage(anyhow::anyhow!("{mismatch}")),
        None => Failure::Run(error),
    }
}

impl Run {
    /// Sees that everything can be written that the run writes, and takes the output directory for it. A run that is
    /// refused leaves nothing.
    fn take_places(&mut self, config_path: &Path, trace: Option<&Path>) -> Result<(), Failure> {
        let monitoring = &self.config.monitoring;
        trace.map_or(Ok(()), trace::check)?;
        profile::check(&monitoring.flops_profiler)?;
        let mut made = MadeDirectories::default();
        let output = output::make(config_path, &self.config, &mut made).or_run()?;
        monitors::check(monitoring, &output, &mut made)?;
        // The lock comes last: its file stays.
        self._lock = Some(output::lock(&output, config_path).or_run()?);
        self.output = output;
        made.keep();
        Ok(())
    }

    /// Trains on the ranks that are threads of this process.
    fn launch(&self) -> Result<Vec<RankOutcome>, Failure> {
        let world_size = self.mesh.world_size();
        match self.config.ulysses.backend {
            #[cfg(feature = "nccl")]
            ulysses::config::Backend::Nccl => {
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
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (dp_size, sp_size) = (self.config.mesh.dp_size, self.config.mesh.sp_size);
        let parameter_groups = &self.config.ulysses.parameter_groups;
        let replicas = self.config.zero_shard_size().map_or_else(String::new, |size| {
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
            u8::from(self.config.zero.stage),
            self.llama.num_parameters() as f64 / 1e6,
            self.phases[0].data.num_rows(),
            self.phases[0].data.seq_len(),
            self.launch.threads_per_rank,
        )
    }
}
