//! Settings of the process, made before anything else runs.

use tracing_subscriber::EnvFilter;

/// candle runs large elementwise ops on one pool behind a barrier that all ranks would
/// share. Ranks bring their own threads, so candle gets one, unless the user says otherwise.
pub(crate) fn limit_candle_threads() {
    const VARIABLE: &str = "CANDLE_NUM_THREADS";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: called first thing in `main`, while the process has one thread.
        unsafe { std::env::set_var(VARIABLE, "1") };
    }
}

/// Log lines on standard error, chosen by `RUST_LOG`; warnings by default.
pub(crate) fn start_logging() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false).init();
}

/// Threads of each rank: what was asked for, or a fair share of the cores.
pub(crate) fn threads_per_rank(asked: Option<usize>, world_size: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    asked.unwrap_or((cores / world_size).max(1))
}
