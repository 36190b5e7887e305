//! Settings of the process, and what it can bear.

use super::Failure;
use super::progress::above_progress;
use anyhow::anyhow;
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::sync::OnceLock;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};
use ulysses::comm::thread::LaunchOptions;
use ulysses::config::{Config, ParameterGroup};
use ulysses::device::DeviceKind;
use ulysses::model::LlamaConfig;
use ulysses::monitor::Tracer;

/// Most threads of all ranks together. More is a typing error that would keep the machine
/// busy for minutes before it fails.
const MAX_THREADS: usize = 4096;

/// The planned peak of a rank, for the error of an allocation that fails.
pub(crate) static PLANNED_PEAK: OnceLock<String> = OnceLock::new();

/// candle runs large elementwise ops on one pool behind a barrier that all ranks would
/// share. Ranks bring their own threads, so candle gets one, unless the user says otherwise.
pub(crate) fn limit_candle_threads() {
    const VARIABLE: &str = "CANDLE_NUM_THREADS";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: called first thing in `main`, while the process has one thread.
        unsafe { std::env::set_var(VARIABLE, "1") };
    }
}

/// A write beyond the file size that the process may write (`ulimit -f`) ends it by a signal, unless that is caught: then
/// the write fails, with an error that names the file.
pub(crate) fn survive_file_size_limit() {
    #[cfg(unix)]
    if let Err(error) = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default()) {
        tracing::warn!("cannot catch SIGXFSZ: {error}");
    }
}

/// Log lines on standard error, chosen by `RUST_LOG`; warnings by default. A tracer sees all of the library's spans.
pub(crate) fn start_logging(tracer: Option<&Tracer>) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(|| LogLine)
        .with_target(false)
        .without_time()
        .with_filter(filter);
    let registry = tracing_subscriber::registry().with(lines);
    match tracer {
        // Nothing but the lines, so that spans that no line is within cost nothing.
        None => registry.init(),
        Some(tracer) => {
            let spans = Targets::new().with_target("ulysses", LevelFilter::TRACE);
            registry.with(tracer.clone().with_filter(spans)).init();
        }
    }
}

/// Standard error, which a live progress line may stand on.
struct LogLine;

impl Write for LogLine {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        above_progress(|| std::io::stderr().write(line))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stderr().flush()
    }
}

/// Threads of each rank: what was asked for, or a fair share of the cores.
pub(super) fn launch_options(asked: Option<usize>, world_size: usize) -> Result<LaunchOptions, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads_per_rank = asked.unwrap_or((cores / world_size.max(1)).max(1));
    if world_size.saturating_mul(threads_per_rank) > MAX_THREADS {
        return Err(Failure::Usage(anyhow!(
            "{world_size} rank(s) of {threads_per_rank} thread(s) each are too many: this process starts at \
             most {MAX_THREADS} threads, so choose a smaller mesh or fewer --threads-per-rank"
        )));
    }
    Ok(LaunchOptions { threads_per_rank, ..LaunchOptions::default() })
}

/// Refuses what cannot fit, since `local_ranks` ranks share this machine's memory: together they hold their part of
/// the parameters and the gradients (but of frozen ones) of one copy at least, and, unless it is offloaded, of the input
/// of every layer. A parameter that is trained is f32 somewhere, whatever the format.
pub(super) fn check_memory(
    config: &Config,
    llama: &LlamaConfig,
    seq_len: usize,
    local_ranks: usize,
) -> Result<(), Failure> {
    const GIB: f64 = (1_u64 << 30) as f64;
    let Some(available) = physical_memory_bytes() else { return Ok(()) };
    let dtype = config.precision.dtype().size_in_bytes() as f64;
    let is_frozen = |name: &str| ParameterGroup::is_frozen(&config.ulysses.parameter_groups, name);
    let frozen = llama.num_parameters_where(is_frozen) as f64;
    let trained = llama.num_parameters() as f64 - frozen;
    // The master copy and the gradient.
    let share = local_ranks as f64 / config.world_size() as f64;
    let stored = if config.zero.offload_param.is_in_file() { 0.0 } else { dtype };
    let values = share * (stored * frozen + (4.0 + stored) * trained);
    let rows = config.micro_batch_size as f64 * config.mesh.dp_size as f64;
    let layers = if config.activation_checkpointing.cpu_checkpointing { 1 } else { llama.num_layers };
    let inputs = share * dtype * rows * seq_len as f64 * llama.hidden_size as f64 * layers as f64;
    if values + inputs <= available {
        return Ok(());
    }
    Err(Failure::Usage(anyhow!(
        "this machine has {:.1} GiB of memory, but the parameters with their gradients take {:.1} GiB and the \
         layers' inputs {:.1} GiB ({rows} rows of {seq_len} tokens, {local_ranks} of {} ranks here): choose a \
         smaller model, seq_len or batch",
        available / GIB,
        values / GIB,
        inputs / GIB,
        config.world_size()
    )))
}

/// Refuses to measure with tensors that cannot fit, `elems` f32 elements in all, where they are on the host.
pub(super) fn check_tensors(device: DeviceKind, elems: f64) -> Result<(), Failure> {
    const GIB: f64 = (1_u64 << 30) as f64;
    let bytes = elems * size_of::<f32>() as f64;
    match physical_memory_bytes() {
        Some(available) if device == DeviceKind::Cpu && bytes > available => Err(Failure::Usage(anyhow!(
            "this machine has {:.1} GiB of memory, but the tensors to measure with take {:.1} GiB: choose smaller ones",
            available / GIB,
            bytes / GIB
        ))),
        _ => Ok(()),
    }
}

fn physical_memory_bytes() -> Option<f64> {
    memory_bytes("MemTotal:")
}

/// A line of `/proc/meminfo`, where the system has one.
pub(super) fn memory_bytes(label: &str) -> Option<f64> {
    kib_line("/proc/meminfo", label).map(|kib| kib * 1024.0)
}

/// Writable memory of a process (`self` is this one).
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct WritableMemory {
    /// Bytes that it has mapped for itself: what RLIMIT_DATA limits.
    pub(super) mapped: u64,
    /// Bytes that it has touched and that are in memory.
    pub(super) resident: u64,
}

impl WritableMemory {
    /// The larger of each.
    pub(super) fn max(self, other: Self) -> Self {
        Self { mapped: self.mapped.max(other.mapped), resident: self.resident.max(other.resident) }
    }
}

/// What a process has, where the system tells.
pub(super) fn writable_memory(process: &str) -> Option<WritableMemory> {
    let path = format!("/proc/{process}/status");
    let bytes = |label| kib_line(&path, label).map(|kib| kib as u64 * 1024);
    Some(WritableMemory { mapped: bytes("VmData:")?, resident: bytes("RssAnon:")? })
}

pub(super) fn kib_line(path: &str, label: &str) -> Option<f64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(label))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}
