//! Signals that ask a run to save and end.

#[cfg(unix)]
use crate::log_line;
#[cfg(unix)]
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Set when `SIGTERM` or `SIGUSR1` arrives, as batch systems send before they take a machine
/// away, or the `SIGINT` of Ctrl-C. A second signal ends the process at once, with 128 plus its number as exit code.
/// `answer` is what the first one is answered with, as a step may take a while.
///
/// # Errors
/// A system that refuses to install a handler.
#[cfg(unix)]
pub(super) fn watch(answer: Option<&'static str>) -> std::io::Result<Arc<AtomicBool>> {
    use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
    use std::os::unix::net::UnixStream;
    let asked = Arc::new(AtomicBool::new(false));
    let (mut reader, writer) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGUSR1, SIGINT] {
        // Handlers run in this order: the first signal still finds `asked` unset.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, asked.clone())?;
        signal_hook::flag::register(signal, asked.clone())?;
        if answer.is_some() {
            signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
        }
    }
    if let Some(answer) = answer {
        // A handler may write to a pipe, and to little else.
        let wait = move || {
            if reader.read_exact(&mut [0]).is_ok() {
                log_line(answer);
            }
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
    }
    Ok(asked)
}

/// Elsewhere there are no such signals.
#[cfg(not(unix))]
pub(super) fn watch(_answer: Option<&'static str>) -> std::io::Result<Arc<AtomicBool>> {
    Ok(Arc::new(AtomicBool::new(false)))
}
