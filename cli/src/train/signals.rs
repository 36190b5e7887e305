//! Signals that make a run save and stop.

#[cfg(unix)]
use crate::output::log_line;
#[cfg(unix)]
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Returns a flag that is set on `SIGTERM` or `SIGUSR1`, which batch systems send before they kill a job, or on
/// `SIGINT`. A second signal ends the process at once with exit code 128 + signal. The first one prints `message`, since
/// a step may take a while.
///
/// # Errors
/// A system that refuses to install a handler.
#[cfg(unix)]
pub(super) fn watch(message: Option<&'static str>) -> std::io::Result<Arc<AtomicBool>> {
    use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
    use std::os::unix::net::UnixStream;
    let is_requested = Arc::new(AtomicBool::new(false));
    let (mut reader, writer) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGUSR1, SIGINT] {
        // Handlers run in this order: the first signal still finds the flag unset.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, is_requested.clone())?;
        signal_hook::flag::register(signal, is_requested.clone())?;
        if message.is_some() {
            signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
        }
    }
    if let Some(message) = message {
        // Signal handlers may write to a pipe, but must not print.
        let wait = move || {
            if reader.read_exact(&mut [0]).is_ok() {
                log_line(message);
            }
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
    }
    Ok(is_requested)
}

/// Returns a flag that is never set, on systems without such signals.
#[cfg(not(unix))]
pub(super) fn watch(_message: Option<&'static str>) -> std::io::Result<Arc<AtomicBool>> {
    Ok(Arc::new(AtomicBool::new(false)))
}
