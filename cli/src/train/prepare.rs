//! Everything that is read and checked before a rank starts.

use super::feed::{Limit, Phase};
use super::resume::{Resume, check_candidate, check_output};
use super::start::PlannedMemory;
use super::{Host, Run, TrainArgs, evaluations, signals};
use crate::config::print_warnings;
use crate::data::{Sources, open_tokenizer};
use crate::{Failure, OrFail, model, settings, training_shape};
use anyhow::{Context, anyhow, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;
use ulysses::comm::LaunchOptions;
use ulysses::config::{Backend, Config, DataSource, Overrides, RawConfig, sizes_of};
use ulysses::data::Dataset;
use ulysses::device::DeviceKind;
use ulysses::engine::check_offload;
use ulysses::mesh::{Cluster, DeviceMesh, Preset, TrainingShape};

pub(super) fn prepare(args: TrainArgs, host: &mut Host) -> Result<Run, Failure> {
    let (path, device, resume, world) =
        (args.config().to_owned(), args.device, args.resume.clone(), args.world);
    let (settings, reset_data) = (args.flags.settings(), args.reset_data);
    let by_flag = args.backend.map(Into::into);
    let mut config = host.enter(
        world,
        by_flag,
        || RawConfig::from_file_with(&path, &settings),
        |raw, cluster, backend| {
            let device = args.rank_device(Some(backend));
            overrides(args, raw, cluster, device)
        },
    )?;
    let device = host.device(device.kind()?, config.ulysses.backend)?;
    let resume = resume.map(Resume::new).transpose()?;
    print_warnings(&config, &path);
    let limit = limit(&config).or_usage()?;
    let seq_lens = seq_lens(&config).or_usage()?;
    config.require_data().or_usage()?;
    evaluations::check(&config)?;
    check_output(&config, resume.as_ref())?;
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size).or_usage()?;
    let local_ranks = host.local_ranks(mesh.world_size());
    let launch = settings::launch_options(config.ulysses.threads_per_rank, local_ranks)?;
    let timeout = Duration::from_secs(config.ulysses.comm.timeout_seconds);
    let launch = LaunchOptions { check: config.ulysses.comm.is_checked(), timeout, ..launch };
    let tokenizer = open_tokenizer(config.ulysses.model.as_deref(), &mut config.ulysses.tokenizer)?;
    let source = model::open(config.require_model().or_usage()?, config.seed, tokenizer.vocab_size())?;
    source.check_config(&config)?;
    for (_, seq_len) in &seq_lens {
        source.check_exchange(config.micro_batch_size, *seq_len, &config, config.mesh.sp_size)?;
        settings::check_memory(&config, &source.config, *seq_len, local_ranks)?;
    }
    let sources = Sources::read(&config, &tokenizer, source.config.vocab_size).or_run()?;
    let phases = seq_lens.into_iter().map(|(first_step, seq_len)| phase(&sources, first_step, seq_len));
    let phases = phases.collect::<anyhow::Result<Vec<_>>>().or_run()?;
    check_candidate(resume.as_ref().filter(|_| !reset_data), &config, &phases)?;
    check_offload(&config, device).or_usage()?;
    let answer = match config.checkpoint {
        Some(_) => "signal received: the run saves and ends after this step; another signal ends it at once",
        None => {
            "signal received: the run ends after this step; nothing will be saved, as the config has no `checkpoint` \
             section; another signal ends it at once"
        }
    };
    let stop =
        signals::watch(host.is_first().then_some(answer)).context("cannot watch for signals").or_run()?;
    let mut run = Run {
        mesh,
        launch,
        device,
        llama: source.config,
        weights: source.weights,
        planned: None,
        hf_source: source.hf_source,
        phases,
        limit,
        output: PathBuf::new(),
        resume,
        reset_data,
        new_run_id: new_run_id(),
        stop,
        tracer: None,
        record: Value::Null,
        _lock: None,
        config,
    };
    run.planned = PlannedMemory::of(&run, local_ranks).or_usage()?;
    Ok(run)
}

/// Tells runs apart; no two processes start at one moment with one number.
fn new_run_id() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let mut id = blake3::hash(format!("{} {}", now.as_nanos(), std::process::id()).as_bytes()).to_hex();
    id.truncate(16);
    id.to_string()
}

/// A backend that this build does not have.
pub(super) fn lacks_backend(name: &str, by_flag: bool) -> Failure {
    let place =
        if by_flag { format!("--backend {name}") } else { format!("`ulysses.backend` is \"{name}\"") };
    Failure::Usage(anyhow!("{place}: this build lacks the feature `{name}`; `thread` is valid"))
}

/// The config of a run. A mesh whose size nobody states fills the job; one that does not fill it is refused later, with
/// what would be valid.
pub(super) fn resolve(raw: &RawConfig, overrides: &Overrides) -> Result<Config, Failure> {
    let unfilled = || Overrides { world_size: None, ..overrides.clone() };
    raw.resolve(overrides).or_else(|error| raw.resolve(&unfilled()).map_err(|_| error)).or_usage()
}

#[cfg(unix)]
impl TrainArgs {
    /// The config of the run, as one of so many processes will have it, and the backend that file or flag states.
    pub(crate) fn for_launch(&self, num_processes: usize) -> Result<(Config, Option<Backend>), Failure> {
        let raw = RawConfig::from_file_with(self.config(), &self.flags.settings()).or_usage()?;
        let cluster = Cluster { nodes: 1, ranks_per_node: num_processes };
        let backend = self.backend.map(Backend::from).or(raw.backend());
        let overrides = overrides(self.clone(), &raw, Some(cluster), self.rank_device(backend))?;
        Ok((resolve(&raw, &overrides)?, backend))
    }
}

/// What the flags say to what the file says, in a job of so many processes, if it is one. `device` is where the ranks'
/// tensors will be.
pub(super) fn overrides(
    args: TrainArgs,
    raw: &RawConfig,
    cluster: Option<Cluster>,
    device: DeviceKind,
) -> Result<Overrides, Failure> {
    let shape = args.mesh.as_deref().map(|mesh| mesh_shape(mesh, cluster)).transpose()?;
    let preset = args.mesh.as_deref().and_then(Preset::named);
    let mesh_selector = mesh_selector(args.mesh_selector.clone(), raw, args.config(), device)?;
    let TrainArgs { model, tokenizer, seq_len, steps, epochs, threads_per_rank, output, seed, .. } = args;
    let data = args.data.into_iter().map(DataSource::from).collect();
    let packing = args.packing;
    Ok(Overrides {
        mesh: shape.map(|shape| (shape.dp, shape.sp)),
        preset,
        shard_size: shape.and_then(|shape| shape.shard_size),
        mesh_selector,
        world_size: cluster.map(Cluster::world_size),
        ranks_per_node: cluster.map(|cluster| cluster.ranks_per_node),
        seq_len,
        steps,
        epochs,
        seed,
        threads_per_rank,
        model,
        data,
        packing,
        tokenizer,
        output,
        backend: None,
    })
}

/// The sizes of `--mesh`, which may be a preset, or leave one to the number of processes.
fn mesh_shape(notation: &str, cluster: Option<Cluster>) -> Result<TrainingShape, Failure> {
    if cluster.is_none() && Preset::named(notation).is_none() {
        return training_shape(notation);
    }
    sizes_of(notation, cluster).with_context(|| format!("--mesh {notation}")).or_usage()
}

/// What the rules of the config are matched with, if it has any.
fn mesh_selector(
    given: Option<String>,
    raw: &RawConfig,
    file: &Path,
    device: DeviceKind,
) -> Result<Option<String>, Failure> {
    match given {
        Some(selector) if !raw.has_mesh_rules() => Err(Failure::Usage(anyhow!(
            "--mesh-selector {selector}: {} has no `ulysses.mesh_rules` to choose from: give it some, or leave the flag \
             out",
            file.display()
        ))),
        None if raw.has_mesh_rules() => Ok(Some(machine(device))),
        given => Ok(given),
    }
}

/// How rules see this machine. A GPU that cannot be asked for its name is refused when it is opened.
fn machine(device: DeviceKind) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let device = device.describe(0).unwrap_or_else(|_| "cuda".to_owned());
    format!("{}/{device}", host.trim())
}

/// What ends the run.
fn limit(config: &Config) -> anyhow::Result<Limit> {
    let Some(epochs) = config.ulysses.epochs else { return Ok(Limit::Steps(config.require_steps()?)) };
    ensure!(
        config.ulysses.seq_len_schedule.is_empty(),
        "`ulysses.epochs` and `ulysses.seq_len_schedule`: an epoch is one of rows of one length, give `ulysses.steps`"
    );
    ensure!(
        config.ulysses.data.iter().all(|source| source.weight.is_none()),
        "`ulysses.epochs` and weights in `ulysses.data`: weighted sources have epochs of their own, give \
         `ulysses.steps`"
    );
    Ok(Limit::Epochs(epochs))
}

/// Every length of the rows, with the steps that are done before.
fn seq_lens(config: &Config) -> anyhow::Result<Vec<(u64, usize)>> {
    let first = (0, config.require_seq_len()?);
    let later = config.ulysses.seq_len_schedule.iter().map(|change| (change.step, change.seq_len));
    Ok(std::iter::once(first).chain(later).collect())
}

fn phase(sources: &Sources, first_step: u64, seq_len: usize) -> anyhow::Result<Phase> {
    let data = sources.training(seq_len)?;
    let data_hash = data.sampled_hash()?;
    let held_out = sources.held_out(seq_len)?;
    // Reading it here also finds ids that the model does not know before any training.
    let held_out_hash = held_out.as_ref().map_or(Ok(0), Dataset::sampled_hash)?;
    Ok(Phase { first_step, data, held_out, data_hash, held_out_hash })
}
