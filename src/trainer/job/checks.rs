//! Checks before a job starts: the threads and the memory of the machine, the checkpoint to resume, and the output
//! directory.

use super::available::meminfo_bytes;
use super::model_source::{check_exchange, check_layers, resolve_ring};
use super::options::{JobError, OrJobError};
use crate::checkpoint::{CheckpointError, MANIFEST, StepDirectory, step_directories};
use crate::comm::LaunchOptions;
use crate::config::{Config, ParameterGroup};
use crate::model::ModelConfig;
use crate::trainer::{Resume, TrainerError, TrainingData};
use std::path::{Path, PathBuf};

/// Maximum number of threads of all ranks. More is a typing error that would block the machine for minutes.
const MAX_THREADS: usize = 4096;

/// Returns options with the requested threads per rank, or an equal share of the cores.
///
/// # Errors
/// More threads than a machine can have.
pub fn launch_options(requested: Option<usize>, world_size: usize) -> Result<LaunchOptions, JobError> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads_per_rank = requested.unwrap_or((cores / world_size.max(1)).max(1));
    if world_size.saturating_mul(threads_per_rank) > MAX_THREADS {
        return Err(JobError::usage(format!(
            "too many threads: {world_size} rank(s) × {threads_per_rank} thread(s) per rank exceed the limit of \
             {MAX_THREADS}; choose a smaller mesh or fewer `ulysses.threads_per_rank` (--threads-per-rank)"
        )));
    }
    Ok(LaunchOptions { threads_per_rank, ..LaunchOptions::default() })
}

/// Returns the options of a config, of which `local_ranks` ranks run on this machine.
///
/// # Errors
/// As for [`launch_options`].
pub fn config_launch_options(config: &Config, local_ranks: usize) -> Result<LaunchOptions, JobError> {
    let launch = launch_options(config.ulysses.threads_per_rank, local_ranks)?;
    let comm = &config.ulysses.comm;
    Ok(LaunchOptions { check: comm.is_checked(), timeout: comm.timeout(), ..launch })
}

/// Rejects runs whose lower bound on memory exceeds this machine's. `local_ranks` ranks together store at least their
/// share of one copy of parameters and gradients and of the input of every layer, unless these are offloaded. Gradients
/// are f32 whatever the dtype.
///
/// # Errors
/// A machine with less memory.
pub fn check_memory(
    config: &Config,
    model: &ModelConfig,
    seq_len: usize,
    local_ranks: usize,
) -> Result<(), JobError> {
    const GIB: f64 = (1_u64 << 30) as f64;
    let Some(available) = meminfo_bytes("MemTotal:") else { return Ok(()) };
    let dtype = config.precision.dtype().size_in_bytes() as f64;
    let is_frozen = |name: &str| ParameterGroup::is_frozen(&config.ulysses.parameter_groups, name);
    let frozen = model.num_parameters_where(is_frozen) as f64;
    let trained = model.num_parameters() as f64 - frozen;
    // The gradient, which is offloaded with the optimizer state where it is partitioned.
    let are_gradients_in_file =
        config.zero.offload_optimizer.is_in_file() && config.zero.stage.partitions_gradients();
    let gradient = if are_gradients_in_file { 0.0 } else { 4.0 };
    let share = local_ranks as f64 / config.world_size() as f64;
    let stored = if config.zero.offload_param.is_in_file() { 0.0 } else { dtype };
    let values = share * (stored * frozen + (gradient + stored) * trained);
    let rows = config.micro_batch_size as f64 * config.mesh.dp_size as f64;
    let layers = if config.activation_checkpointing.cpu_checkpointing { 1 } else { model.num_layers() };
    let inputs = share * dtype * rows * seq_len as f64 * model.hidden_size as f64 * layers as f64;
    if values + inputs <= available {
        return Ok(());
    }
    Err(JobError::usage(format!(
        "not enough memory: this machine has {:.1} GiB, but parameters and gradients take {:.1} GiB and layer inputs \
         {:.1} GiB ({rows} sequences of {seq_len} tokens, {local_ranks} of {} ranks on this machine); choose a smaller \
         model, seq_len or batch",
        available / GIB,
        values / GIB,
        inputs / GIB,
        config.world_size()
    )))
}

/// Resolves a ring size of `"auto"` for ranks of one node, and checks that a model fits the config, on sequences of `seq_len`
/// tokens.
///
/// # Errors
/// As for [`check_layers`] and [`check_exchange`].
pub fn fit_model(model: &ModelConfig, config: &mut Config, seq_len: usize) -> Result<(), JobError> {
    resolve_ring(model, config, config.world_size());
    check_layers(model, config)?;
    check_exchange(model, config.micro_batch_size, seq_len, config)
}

/// Resolves the value of the flag.
pub(super) fn open_resume(dir: Option<PathBuf>) -> Result<Resume, JobError> {
    Resume::new(dir).map_err(|error| match error {
        error @ TrainerError::NothingToResume { .. } => JobError::usage(format!("--resume {error}")),
        error => JobError::usage(error),
    })
}

/// Rejects mixing the checkpoints of two runs in one directory.
pub(super) fn check_output(config: &Config, resume: Option<&Resume>) -> Result<(), JobError> {
    let refuse = |message: String| Err(JobError::usage(message));
    let Some(output) = config.ulysses.output.as_deref() else {
        return match resume {
            Some(Resume::Newest(None)) => refuse(
                "--resume needs an output directory: give `ulysses.output` (--output), or a checkpoint such as \
                 --resume DIR/step_00000100"
                    .to_owned(),
            ),
            _ => Ok(()),
        };
    };
    if Path::new(output).join(MANIFEST).exists() {
        return refuse(format!(
            "`ulysses.output` or --output {output}: expected a directory for the run's checkpoints, found a checkpoint"
        ));
    }
    let directories = step_directories(Path::new(output)).or_usage()?;
    let Some(StepDirectory { step: newest, name: newest_name }) = directories.into_iter().next() else {
        return Ok(());
    };
    let Some(resume) = resume else {
        return refuse(format!(
            "{output} contains checkpoints of an earlier run, up to {newest_name}: resume with --resume, or start a new \
             run with another `ulysses.output` (--output)"
        ));
    };
    match (resume.may_save_beside(newest, Path::new(output)).or_usage()?, resume) {
        (true, _) | (false, Resume::Newest(None)) => Ok(()),
        (false, Resume::Newest(Some(dir)) | Resume::From(dir)) => refuse(format!(
            "{output} contains {newest_name}, which is newer than {}: give another `ulysses.output` (--output), or move it away",
            dir.display()
        )),
    }
}

/// Rejects resuming with other data.
pub(super) fn check_candidate(
    resume: Option<&Resume>,
    config: &Config,
    data: &TrainingData,
) -> Result<(), JobError> {
    let candidate = resume
        .map(|resume| resume.candidate(config.ulysses.output.as_deref().map(Path::new)))
        .transpose()
        .or_usage()?;
    let Some(checkpoint) = candidate.flatten() else { return Ok(()) };
    const HINT: &str = "a run resumes with the same `ulysses.data`, `ulysses.seq_len`, `ulysses.packing`, `ulysses.validation` and \
                        seed. For longer sequences use `ulysses.seq_len_schedule`; for other data use --reset-data; to start a new \
                        run from its parameters, export the checkpoint and pass it as --model";
    let is_dir = |path: &&String| Path::new(path).is_dir();
    let directory = config.ulysses.data.iter().map(|source| &source.path).find(is_dir);
    let added = directory.map_or(String::new(), |dir| {
        format!(". {dir} is a directory: all text files in it are data, also a log file that was added")
    });
    let named = |cause: CheckpointError| format!("{cause}: {HINT}{added}");
    data.check_resumes(&checkpoint, config.seed).map_err(named).or_usage()
}
