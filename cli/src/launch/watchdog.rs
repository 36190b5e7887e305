//! A process that ends the processes of a job if `launch` itself is killed.
//!
//! The watchdog leads the process group of the job and reads a pipe whose other end only `launch` holds. A child joins
//! the group before it executes its program, and inherits that end until then. So when the watchdog reads the end of
//! the pipe, all children are in the group and have the mark of the job in their environment.

use super::processes::{JobProcesses, Scope, unique_text};
use crate::failure::{Failure, OrFail};
use anyhow::{Context, anyhow};
use rustix::process::{Pid, Signal, getpgrp, kill_current_process_group, kill_process_group};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval between attempts to remove the directory.
const REMOVE_INTERVAL: Duration = Duration::from_millis(50);
/// Time for these attempts.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Signals that `launch` forwards to the group.
pub(super) const FORWARDED_SIGNALS: [Signal; 3] = [Signal::INT, Signal::TERM, Signal::USR1];

#[derive(clap::Args)]
pub(crate) struct WatchdogArgs {
    /// Seconds between SIGTERM and SIGKILL.
    #[arg(long)]
    grace: u64,
    /// Mark of the processes of the job.
    #[arg(long)]
    mark: String,
    /// Directory to remove when `launch` has been killed.
    #[arg(long)]
    remove: Option<PathBuf>,
}

/// The watchdog of a job. Dropping it ends it without ending the job.
pub(super) struct Watchdog {
    /// Its standard input is the pipe.
    process: Child,
    job: JobProcesses,
}

impl Watchdog {
    /// Starts a watchdog, which ignores the signals for its group. If `launch` is killed, it also removes a directory.
    pub(super) fn start(grace: Duration, removes: Option<&Path>) -> anyhow::Result<Self> {
        let mark = unique_text();
        let mut command =
            Command::new(std::env::current_exe().context("cannot find the path of this program")?);
        command.args(["launch-watchdog", "--grace", &grace.as_secs().to_string(), "--mark", &mark]);
        command.args(removes.map(|path| ["--remove".as_ref(), path.as_os_str()]).into_iter().flatten());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
        let mut process = command.spawn().context("cannot start the watchdog")?;
        let group = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
        let is_ready = process.stdout.take().is_some_and(|mut pipe| pipe.read_exact(&mut [0]).is_ok());
        match group.filter(|_| is_ready) {
            Some(group) => Ok(Self { process, job: JobProcesses { group, mark } }),
            None => {
                let status = process.kill().and_then(|()| process.wait()).context("watchdog")?;
                Err(anyhow!("cannot start the watchdog: it ended with {status}"))
            }
        }
    }

    /// Returns the processes that it watches.
    pub(super) fn job(&self) -> &JobProcesses {
        &self.job
    }

    /// Returns whether something has killed it. No process can join its group then.
    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(self.process.try_wait(), Ok(None))
    }

    /// Sends a signal to the process group of the job.
    pub(super) fn send(&self, signal: Signal) {
        // An error means that the group is empty.
        let _ = kill_process_group(self.job.group, signal);
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}

/// Runs the watchdog process: waits for the end of `launch`.
pub(crate) fn watch(args: &WatchdogArgs) -> Result<(), Failure> {
    for signal in FORWARDED_SIGNALS {
        signal_hook::flag::register(signal.as_raw(), Arc::default()).or_run()?;
    }
    let mut stdout = std::io::stdout();
    stdout.write_all(b"\n").and_then(|()| stdout.flush()).or_run()?;
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).or_run()?;
    // `mpirun` forwards this to its ranks.
    let _ = kill_current_process_group(Signal::TERM);
    let job = JobProcesses { group: getpgrp(), mark: args.mark.clone() };
    job.kill_after(Scope::All, Duration::from_secs(args.grace));
    args.remove.as_deref().map_or(Ok(()), remove).or_run()
}

/// Removes a directory. Processes that are just ending may still be writing into it.
fn remove(directory: &Path) -> std::io::Result<()> {
    let deadline = Instant::now() + REMOVE_TIMEOUT;
    loop {
        match std::fs::remove_dir_all(directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(_) if Instant::now() < deadline => std::thread::sleep(REMOVE_INTERVAL),
            result => return result,
        }
    }
}
