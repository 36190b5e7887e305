//! Everything that is read and checked before a rank starts.

use super::output::{earlier_steps, prepare_output};
use super::{BackendArg, Host, Resume, Run, TrainArgs, signals};
use crate::cli::config::remark;
use crate::cli::{Failure, OrFail, dp_sp, model, note, settings};
use anyhow::{Context, ensure};
use std::path::Path;
use std::sync::Arc;
use ulysses::comm::LaunchOptions;
use ulysses::config::{Backend, Config, Overrides, RawConfig};
use ulysses::data::{Corpus, PackedRows, Tokenizer};
use ulysses::device::DeviceKind;
use ulysses::mesh::DeviceMesh;

pub(super) fn prepare(args: TrainArgs, host: &mut Host) -> Result<Run, Failure> {
    let (config_path, device) = (args.config.clone(), args.device.kind()?);
    let resume = args.resume.clone().map(|dir| dir.map_or(Resume::Newest, Resume::From));
    let raw = RawConfig::from_file(&config_path).or_usage()?;
    let mut config = raw.resolve(&overrides(args)?).or_usage()?;
    host.enter(&config)?;
    remark(&config);
    let device = if config.backend == Backend::Nccl { gpus_of_nccl()? } else { device };
    let (steps, seq_len) = (config.require_steps().or_usage()?, config.require_seq_len().or_usage()?);
    config.require_data().or_usage()?;
    earlier_steps(&config, resume.as_ref()).or_usage()?;
    let mesh = DeviceMesh::dp_sp(config.dp_size, config.sp_size).or_usage()?;
    let launch = settings::launch_options(config.threads_per_rank, host.local_ranks(mesh.world_size()))?;
    let launch = LaunchOptions { check: config.comm_check, ..launch };
    let tokenizer = open_tokenizer(&mut config)?;
    let source = model::open(config.require_model().or_usage()?, config.seed, tokenizer.vocab_size())?;
    source.check_exchange(config.micro_batch_size, seq_len, config.sp_size)?;
    settings::check_memory(&config, &source.config, seq_len)?;
    let rows = read_rows(&config, &tokenizer, seq_len, source.config.vocab_size).or_run()?;
    // Last: nothing is written for a run that cannot start.
    let (output, lock) = match host.is_first() {
        true => prepare_output(&config_path, &config, resume.is_some())
            .map(|(output, lock)| (output, Some(lock)))
            .or_run()?,
        false => Default::default(),
    };
    // Without checkpoints there is nothing to save: signals keep their usual effect.
    let watch = || signals::watch().context("cannot watch for signals").or_run();
    let stop = if config.checkpoint.is_some() { watch()? } else { Arc::default() };
    Ok(Run {
        mesh,
        launch,
        device,
        llama: source.config,
        weights: source.weights,
        rows: Arc::new(rows),
        steps,
        output,
        resume,
        new_run_id: new_run_id(),
        stop,
        _lock: lock,
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

/// With NCCL every rank has a GPU, whatever `--device` says.
fn gpus_of_nccl() -> Result<DeviceKind, Failure> {
    if cfg!(not(feature = "nccl")) {
        let message = "--backend nccl: this build lacks the feature `nccl`; `thread` is valid";
        return Err(Failure::Usage(anyhow::anyhow!(message)));
    }
    DeviceKind::Cuda.open(0).or_usage()?;
    Ok(DeviceKind::Cuda)
}

fn overrides(args: TrainArgs) -> Result<Overrides, Failure> {
    let mesh = args.mesh.as_deref().map(dp_sp).transpose()?;
    let backend = args.backend.map(|backend| match backend {
        BackendArg::Thread => Backend::Thread,
        BackendArg::Nccl => Backend::Nccl,
        BackendArg::Mpi => Backend::Mpi,
    });
    let TrainArgs { model, data, tokenizer, seq_len, steps, threads_per_rank, output, seed, .. } = args;
    Ok(Overrides {
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
    })
}

/// The tokenizer that was asked for, or the model's own, or bytes.
fn open_tokenizer(config: &mut Config) -> Result<Tokenizer, Failure> {
    if config.tokenizer.is_none()
        && let Some(path) = config.model.as_deref().and_then(model::own_tokenizer)
    {
        note(format_args!("tokenizer: {}", path.display()));
        config.tokenizer = Some(path.display().to_string());
    }
    match &config.tokenizer {
        Some(path) => Tokenizer::from_file(Path::new(path)).or_usage(),
        None => Ok(Tokenizer::bytes()),
    }
}

fn read_rows(
    config: &Config,
    tokenizer: &Tokenizer,
    seq_len: usize,
    vocab_size: usize,
) -> anyhow::Result<PackedRows> {
    let data = config.require_data()?;
    let corpus = Corpus::load(Path::new(data), tokenizer).context("the data cannot be read")?;
    if corpus.skipped().total() > 0 {
        note(format_args!("data: {}", corpus.skipped()));
    }
    let num_tokens = corpus.num_tokens();
    ensure!(
        num_tokens > corpus.num_documents(),
        "{data}: every document has a single token, so there is no next token to learn"
    );
    if num_tokens < seq_len {
        tracing::warn!("{data} has {num_tokens} tokens: most of its only row of {seq_len} is padding");
    }
    let rows = PackedRows::new(corpus, seq_len)?;
    rows.check_vocab(vocab_size).with_context(|| {
        let tokenizer = config.tokenizer.as_deref().unwrap_or("of bytes");
        let model = config.model.as_deref().unwrap_or_default();
        format!("the tokenizer {tokenizer} does not fit the model {model}")
    })?;
    Ok(rows)
}
