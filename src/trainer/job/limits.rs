//! Limits of the machine that a job is checked against before it starts: threads and memory.

use super::error::JobError;
use crate::comm::LaunchOptions;
use crate::config::{Config, ParameterGroup};
use crate::model::LlamaConfig;

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
             {MAX_THREADS}; choose a smaller mesh or fewer --threads-per-rank"
        )));
    }
    Ok(LaunchOptions { threads_per_rank, ..LaunchOptions::default() })
}

/// Rejects runs whose lower bound on memory exceeds this machine's. `local_ranks` ranks together store at least their
/// share of one copy of parameters and gradients and of the input of every layer, unless these are offloaded. Gradients
/// are f32 whatever the dtype.
///
/// # Errors
/// A machine with less memory.
pub fn check_memory(
    config: &Config,
    llama: &LlamaConfig,
    seq_len: usize,
    local_ranks: usize,
) -> Result<(), JobError> {
    const GIB: f64 = (1_u64 << 30) as f64;
    let Some(available) = meminfo_bytes("MemTotal:") else { return Ok(()) };
    let dtype = config.precision.dtype().size_in_bytes() as f64;
    let is_frozen = |name: &str| ParameterGroup::is_frozen(&config.ulysses.parameter_groups, name);
    let frozen = llama.num_parameters_where(is_frozen) as f64;
    let trained = llama.num_parameters() as f64 - frozen;
    // The gradient, which is offloaded with the optimizer state where it is partitioned.
    let are_gradients_in_file =
        config.zero.offload_optimizer.is_in_file() && config.zero.stage.partitions_gradients();
    let gradient = if are_gradients_in_file { 0.0 } else { 4.0 };
    let share = local_ranks as f64 / config.world_size() as f64;
    let stored = if config.zero.offload_param.is_in_file() { 0.0 } else { dtype };
    let values = share * (stored * frozen + (gradient + stored) * trained);
    let rows = config.micro_batch_size as f64 * config.mesh.dp_size as f64;
    let layers = if config.activation_checkpointing.cpu_checkpointing { 1 } else { llama.num_layers };
    let inputs = share * dtype * rows * seq_len as f64 * llama.hidden_size as f64 * layers as f64;
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

/// Reads a line of `/proc/meminfo`, such as `MemTotal:`, in bytes; `None` on systems without it.
pub fn meminfo_bytes(label: &str) -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(label))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok().map(|kib: f64| kib * 1024.0)
}
