//! Signals that make a run save and stop.

use crate::output::log_line;
use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use ulysses::trainer::JobError;

/// Sets `stop` on `SIGTERM` or `SIGUSR1`, which batch systems send before they kill a job, or on `SIGINT`. A second signal
/// ends the process at once with exit code 128 + signal. The first one prints a message, since a step may take a while, and
/// sets the flag after it: a run that ends at once has still said why. `saves`: whether the run saves checkpoints.
///
/// # Errors
/// A system that refuses to install a handler.
pub(super) fn watch(stop: Arc<AtomicBool>, saves: bool) -> Result<(), JobError> {
    start(stop, saves).context("cannot handle signals").map_err(JobError::run)
}

fn start(stop: Arc<AtomicBool>, saves: bool) -> std::io::Result<()> {
    let is_signaled = Arc::new(AtomicBool::new(false));
    let (mut reader, writer) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGUSR1, SIGINT] {
        // Handlers run in this order: the first signal still finds the flag unset.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, is_signaled.clone())?;
        signal_hook::flag::register(signal, is_signaled.clone())?;
        signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
    }
    // Signal handlers may write to a pipe, but must not print.
    let wait = move || {
        if reader.read_exact(&mut [0]).is_ok() {
            log_line(match saves {
                true => "signal received: saving and stopping after this step; a second signal stops at once",
                false => {
                    "signal received: stopping after this step without saving (the config has no `checkpoint` section); a \
                     second signal stops at once"
                }
            });
            stop.store(true, Ordering::Relaxed);
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
    Ok(())
}
