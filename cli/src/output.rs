//! Standard output and standard error of this process, which one process of a job writes.

use crate::failure::{Failure, OrFail};
use crate::progress::above_progress;
use anyhow::Context;
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use ulysses::monitor::{escaped, write_line};
use ulysses::trainer::job::JobLog;

/// Whether this process prints nothing, because another process of the job reports to the user.
static IS_MUTED: AtomicBool = AtomicBool::new(false);

/// [`log_line`] and [`mute`] for the library.
pub(crate) const LOG: JobLog = JobLog { line: log, mute };

/// Turns the output of [`print`] and [`log_line`] off or on: one process of a job reports to the user.
fn mute(is_muted: bool) {
    IS_MUTED.store(is_muted, Ordering::Relaxed);
}

/// Writes a result to standard output with control characters escaped, since names may contain any. A pipe that its
/// reader closes early, such as `head`, is no error.
pub(crate) fn print(text: impl Display) -> Result<(), Failure> {
    if IS_MUTED.load(Ordering::Relaxed) {
        return Ok(());
    }
    let text = text.to_string();
    let mut stdout = std::io::stdout().lock();
    match write!(stdout, "{}", escaped(&text)).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output").or_run(),
    }
}

/// Writes a line about the run to standard error with control characters escaped. Write errors are ignored.
pub(crate) fn log_line(line: impl Display) {
    if !IS_MUTED.load(Ordering::Relaxed) {
        let line = line.to_string();
        let _ = above_progress(|| write_line(&mut std::io::stderr(), &line));
    }
}

/// [`log_line`] as the function pointer that the library takes for its log.
pub(crate) fn log(line: &str) {
    log_line(line);
}
