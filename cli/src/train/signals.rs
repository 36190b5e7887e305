//! Signals that make a run save and stop.

#[cfg(unix)]
use crate::output::log_line;
#[cfg(unix)]
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
#[cfg(unix)]
use std::sync::atomic::Ordering;

/// Returns a flag that is set on `SIGTERM` or `SIGUSR1`, which batch systems send before they kill a job, or on
/// `SIGINT`. A second signal ends the process at once with exit code 128 + signal. The first one prints `message`, since
/// a step may take a while, and sets the flag after it: a run that ends at once has still said why.
///
/// # Errors
/// A system that refuses to install a handler.
#[cfg(unix)]
pub(super) fn watch(message: Option<&'static str>) -> std::io::Result<Arc<AtomicBool>> {
    use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
    use std::os::unix::net::UnixStream;
    let (is_signaled, is_requested) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (mut reader, writer) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGUSR1, SIGINT] {
        // Handlers run in this order: the first signal still finds the flag unset.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, is_signaled.clone())?;
        signal_hook::flag::register(signal, is_signaled.clone())?;
        signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
    }
    // Signal handlers may write to a pipe, but must not print.
    let request = is_requested.clone();
    let wait = move || {
        if reader.read_exact(&mut [0]).is_ok() {
            message.into_iter().for_each(log_line);
            request.store(true, Ordering::Relaxed);
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
    Ok(is_requested)
}

/// Returns a flag that is never set, on systems without such signals.
#[cfg(not(unix))]
pub(super) fn watch(_message: Option<&'static str>) -> std::io::Result<Arc<AtomicBool>> {
    Ok(Arc::new(AtomicBool::new(false)))
}
