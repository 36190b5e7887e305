//! Everything that is read and checked before a rank starts.

use super::feed::{Limit, Phase};
use super::resume::{Resume, check_candidate, check_output};
use super::{BackendArg, Host, Run, TrainArgs, signals};
use crate::cli::config::remark;
use crate::cli::data::{Sources, open_tokenizer};
use crate::cli::{Failure, OrFail, dp_sp, model, settings};
use anyhow::{Context, anyhow, ensure};
use std::path::PathBuf;
use std::sync::Arc;
use ulysses::comm::LaunchOptions;
use ulysses::config::{Backend, Config, DataSource, Overrides, RawConfig};
use ulysses::data::Dataset;
use ulysses::device::DeviceKind;
use ulysses::mesh::DeviceMesh;

pub(super) fn prepare(args: TrainArgs, host: &mut Host) -> Result<Run, Failure> {
    let device = args.device.kind()?;
    let resume = args.resume.clone().map(Resume::new).transpose()?;
    let names_backend = args.backend.is_some();
    let raw = RawConfig::from_file(&args.config).or_usage()?;
    let mut config = raw.resolve(&overrides(args)?).or_usage()?;
    host.enter(&config, names_backend)?;
    remark(&config);
    let device = if config.backend == Backend::Nccl { gpus_of_nccl(names_backend)? } else { device };
    let limit = limit(&config).or_usage()?;
    let seq_lens = seq_lens(&config).or_usage()?;
    config.require_data().or_usage()?;
    check_output(&config, resume.as_ref())?;
    let mesh = DeviceMesh::dp_sp(config.dp_size, config.sp_size).or_usage()?;
    let local_ranks = host.local_ranks(mesh.world_size());
    let launch = settings::launch_options(config.threads_per_rank, local_ranks)?;
    let launch = LaunchOptions { check: config.comm_check, ..launch };
    let tokenizer = open_tokenizer(config.model.as_deref(), &mut config.tokenizer)?;
    let source = model::open(config.require_model().or_usage()?, config.seed, tokenizer.vocab_size())?;
    source.check_config(&config)?;
    for (_, seq_len) in &seq_lens {
        source.check_exchange(config.micro_batch_size, *seq_len, &config, config.sp_size)?;
        settings::check_memory(&config, &source.config, *seq_len, local_ranks)?;
    }
    let sources = Sources::read(&config, &tokenizer, source.config.vocab_size).or_run()?;
    let phases = seq_lens.into_iter().map(|(first_step, seq_len)| phase(&sources, first_step, seq_len));
    let phases = phases.collect::<anyhow::Result<Vec<_>>>().or_run()?;
    check_candidate(resume.as_ref(), &config, &phases)?;
    // Without checkpoints there is nothing to save: signals keep their usual effect.
    let watch = || signals::watch().context("cannot watch for signals").or_run();
    let stop = if config.checkpoint.is_some() { watch()? } else { Arc::default() };
    Ok(Run {
        mesh,
        launch,
        device,
        llama: source.config,
        weights: source.weights,
        phases,
        limit,
        output: PathBuf::new(),
        resume,
        new_run_id: new_run_id(),
        stop,
        tracer: None,
        _lock: None,
        config,
    })
}

/// Tells runs apart; no two processes start at one moment with one number.
fn new_run_id() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let mut id = blake3::hash(format!("{} {}", now.as_nanos(), std::process::id()).as_bytes()).to_hex();
    id.truncate(16);
    id.to_string()
}

/// With NCCL every rank has a GPU, whatever `--device` says. `by_flag`: it was asked for by a flag, not in the file.
fn gpus_of_nccl(by_flag: bool) -> Result<DeviceKind, Failure> {
    if cfg!(not(feature = "nccl")) {
        return Err(lacks_backend("nccl", by_flag));
    }
    DeviceKind::Cuda.open(0).or_usage()?;
    Ok(DeviceKind::Cuda)
}

/// A backend that this build does not have.
pub(super) fn lacks_backend(name: &str, by_flag: bool) -> Failure {
    let place =
        if by_flag { format!("--backend {name}") } else { format!("`ulysses.backend` is \"{name}\"") };
    Failure::Usage(anyhow!("{place}: this build lacks the feature `{name}`; `thread` is valid"))
}

fn overrides(args: TrainArgs) -> Result<Overrides, Failure> {
    let mesh = args.mesh.as_deref().map(dp_sp).transpose()?;
    let backend = args.backend.map(|backend| match backend {
        BackendArg::Thread => Backend::Thread,
        BackendArg::Nccl => Backend::Nccl,
        BackendArg::Mpi => Backend::Mpi,
    });
    let TrainArgs { model, tokenizer, seq_len, steps, epochs, threads_per_rank, output, seed, .. } = args;
    let data = args.data.into_iter().map(DataSource::from).collect();
    let packing = args.packing;
    Ok(Overrides {
        mesh,
        world_size: None,
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
        backend,
    })
}

/// What ends the run.
fn limit(config: &Config) -> anyhow::Result<Limit> {
    let Some(epochs) = config.epochs else { return Ok(Limit::Steps(config.require_steps()?)) };
    ensure!(
        config.seq_len_schedule.is_empty(),
        "`ulysses.epochs` and `ulysses.seq_len_schedule`: an epoch is one of rows of one length, give `ulysses.steps`"
    );
    ensure!(
        config.data.iter().all(|source| source.weight.is_none()),
        "`ulysses.epochs` and weights in `ulysses.data`: weighted sources have epochs of their own, give \
         `ulysses.steps`"
    );
    Ok(Limit::Epochs(epochs))
}

/// Every length of the rows, with the steps that are done before.
fn seq_lens(config: &Config) -> anyhow::Result<Vec<(u64, usize)>> {
    let first = (0, config.require_seq_len()?);
    let later = config.seq_len_schedule.iter().map(|change| (change.step, change.seq_len));
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
