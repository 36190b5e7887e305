//! A process that ends those of a job when `launch` itself is killed.
//!
//! The watchdog leads a process group that all processes of the job are started in, and reads a pipe whose other end
//! only `launch` has. A process joins the group before it runs its program, and holds that end until it does: when the
//! watchdog reads the end of the pipe, all that `launch` has started is in the group.

use super::processes::{kill_tree, processes, tree};
use crate::{Failure, OrFail};
use anyhow::{Context, anyhow};
use rustix::process::{Pid, Signal, getpgrp, kill_current_process_group, kill_process_group};
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two looks at the processes.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The signals that `launch` passes on to the group.
pub(super) const PASSED_ON: [Signal; 3] = [Signal::INT, Signal::TERM, Signal::USR1];

#[derive(clap::Args)]
pub(crate) struct WatchdogArgs {
    /// Seconds between asking the processes to end and killing them.
    #[arg(long)]
    grace: u64,
}

/// The watchdog of a job. Dropping it dismisses it.
pub(super) struct Watchdog {
    /// Its standard input is the pipe.
    process: Child,
    group: Pid,
}

impl Watchdog {
    /// Starts one, which ignores the signals for its group from then on.
    pub(super) fn start(grace: Duration) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe().context("where this program is")?);
        command.args(["launch-watchdog", "--grace", &grace.as_secs().to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
        let mut process = command.spawn().context("cannot start the watchdog of the job")?;
        let group = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
        let is_ready = process.stdout.take().is_some_and(|mut pipe| pipe.read_exact(&mut [0]).is_ok());
        match group.filter(|_| is_ready) {
            Some(group) => Ok(Self { process, group }),
            None => {
                let status = process.kill().and_then(|()| process.wait()).context("watchdog")?;
                Err(anyhow!("cannot start the watchdog of the job: it ended with {status}"))
            }
        }
    }

    /// The group to start processes in.
    pub(super) fn group(&self) -> i32 {
        self.group.as_raw_pid()
    }

    /// Sends a signal to all processes of the job that still run.
    pub(super) fn send(&self, signal: Signal) {
        // A group without any needs no signal.
        let _ = kill_process_group(self.group, signal);
    }

    /// Kills all processes of the job that still run, and the watchdog.
    pub(super) fn kill_all(&self) {
        kill_tree(&tree(&processes(), self.group), self.group);
    }

    /// Lets go of what the processes have left running.
    pub(super) fn dismiss(&mut self) {
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.dismiss();
    }
}

/// The watchdog itself, a process of its own: waits for the end of `launch`.
pub(crate) fn watch(args: &WatchdogArgs) -> Result<(), Failure> {
    for signal in PASSED_ON {
        signal_hook::flag::register(signal.as_raw(), Arc::default()).or_run()?;
    }
    let mut stdout = std::io::stdout();
    stdout.write_all(b"\n").and_then(|()| stdout.flush()).or_run()?;
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).or_run()?;
    end_group(Duration::from_secs(args.grace));
    Ok(())
}

/// Asks all processes of this one's group to end, and kills those that have not within `grace`, with what they have
/// started in other groups.
fn end_group(grace: Duration) {
    let (group, deadline) = (getpgrp(), Instant::now() + grace);
    // A process is not known by its parent any more once that has ended.
    let mut known = tree(&processes(), group);
    // `mpirun` passes this on to its ranks.
    let _ = kill_current_process_group(Signal::TERM);
    while Instant::now() < deadline {
        let all = processes();
        known.extend(tree(&all, group));
        known.sort_unstable();
        known.dedup();
        known.retain(|id| all.iter().any(|process| process.id == *id && !process.is_zombie));
        if known == [std::process::id()] {
            return;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    kill_tree(&known, group);
}
