//! Starts, supervises and stops the processes of a job on this machine.

use super::memory_dir::{MEMORY_DIR_VARIABLE, MemoryDir};
use super::mpi::mpirun::MpirunRanks;
use super::output::{RankLogs, Source};
use super::processes::{JobProcesses, Scope};
use super::rank_failure::RankFailure;
use super::running::{Running, drain_outputs};
use super::signals::Signals;
use super::watchdog::Watchdog;
use crate::failure::{Failure, OrFail};
use crate::output::log_line;
use anyhow::anyhow;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use ulysses::comm::store::JobStore;

/// Interval of polling the processes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time between SIGKILL and giving up on a process that waits in the kernel, for a file system or a GPU driver that does
/// not answer.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts the processes of this machine, watches them, and ends them: one for all starts of a job.
pub(super) struct Supervisor {
    /// The directory of the ranks' copies in memory, if the config wants them.
    memory: Option<MemoryDir>,
    watchdog: Watchdog,
    /// Time between SIGTERM and SIGKILL.
    grace: Duration,
    /// Files that get the output of each rank too, if wanted.
    logs: Option<Arc<RankLogs>>,
}

/// A process to start, and what its output is.
pub(super) struct ProcessCommand {
    pub(super) source: Source,
    pub(super) command: Command,
}

/// The way in which the processes of this machine ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Ended {
    Done,
    /// Stopped by a signal, with this exit code: 75 if a rank saved, else 128 + signal.
    Stopped(u8),
    /// A rank of this machine failed, or the processes were stopped because of another machine.
    Failed,
}

/// The other machines of a job: called all the time, with the ranks' store if this process hosts it, and once with the
/// first process that failed here. Returns why the processes are to be stopped, if they are.
pub(super) type Exchange<'a> = &'a mut dyn FnMut(Option<&RankFailure>, Option<&JobStore>) -> Option<String>;

impl Supervisor {
    /// Starts the watchdog, and then creates the directory for copies in memory.
    pub(super) fn new(
        grace: Duration,
        mut memory: Option<MemoryDir>,
        logs: Option<RankLogs>,
    ) -> Result<Self, Failure> {
        let watchdog = Watchdog::start(grace, memory.as_ref().map(MemoryDir::path)).or_run()?;
        memory.as_mut().map_or(Ok(()), MemoryDir::create).or_usage()?;
        Ok(Self { memory, watchdog, grace, logs: logs.map(Arc::new) })
    }

    /// Runs processes to their end. If one fails, here or on another machine, the others are stopped. `store` is that of the
    /// ranks, if this process hosts it.
    pub(super) fn run(
        &mut self,
        commands: Vec<ProcessCommand>,
        store: Option<JobStore>,
        signals: &Signals,
        exchange: Exchange<'_>,
    ) -> anyhow::Result<Ended> {
        if self.watchdog.has_ended() {
            self.watchdog = Watchdog::start(self.grace, self.memory.as_ref().map(MemoryDir::path))?;
        }
        let job = self.watchdog.job();
        let mut start = Start { supervisor: self, processes: Vec::new(), store, requested: None };
        // If one cannot be started, dropping the start ends the others.
        for ProcessCommand { source, mut command } in commands {
            // A group of its own, so that a terminal's signals arrive only once, through this process.
            command.process_group(job.group.as_raw_pid());
            job.set_mark(&mut command);
            if let Some(memory) = &self.memory {
                command.env(MEMORY_DIR_VARIABLE, memory.path());
            }
            start.processes.push(Running::start(source, &mut command, self.logs.as_ref())?);
        }
        start.supervise(signals, exchange)
    }
}

/// The processes of a start.
struct Start<'a> {
    supervisor: &'a Supervisor,
    processes: Vec<Running>,
    store: Option<JobStore>,
    /// The last signal that asked the job to stop, if any.
    requested: Option<Signal>,
}

/// Why the processes are stopped.
struct Stop {
    reason: String,
    /// Whether a process of this machine failed.
    is_own: bool,
    /// When they are killed.
    deadline: Instant,
}

impl Start<'_> {
    fn supervise(&mut self, signals: &Signals, exchange: Exchange<'_>) -> anyhow::Result<Ended> {
        let grace = self.supervisor.grace;
        let mut stop: Option<Stop> = None;
        let mut killed_at: Option<Instant> = None;
        let mut mpirun = MpirunRanks::default();
        loop {
            for signal in signals.take() {
                self.forward(signal);
            }
            if let Some(store) = &mut self.store {
                store.poll();
            }
            let failure = self.first_failure(stop.is_some());
            let asked = exchange(failure.as_ref(), self.store.as_ref());
            let is_own = failure.is_some();
            if let Some(reason) = failure.map(|failure| failure.to_string()).or(asked)
                && stop.is_none()
            {
                self.stop(&reason);
                stop = Some(Stop { reason, is_own, deadline: Instant::now() + grace });
            }
            if self.running().next().is_none() {
                break;
            }
            let hangs = killed_at.is_none() && mpirun.has_outlived_its_ranks(&self.processes, grace);
            if hangs {
                let seconds = grace.as_secs();
                log_line(format_args!(
                    "launch: killing mpirun, which still runs {seconds} s after its ranks ended"
                ));
            }
            match killed_at {
                Some(killed_at) if killed_at.elapsed() > KILL_TIMEOUT => {
                    // A restart would need the memory and the GPU that such a process still has.
                    let cause = stop.map_or(String::new(), |stop| format!("{}; ", stop.reason));
                    return Err(anyhow!("{cause}{}", self.unkillable()));
                }
                None if hangs || stop.as_ref().is_some_and(|stop| Instant::now() > stop.deadline) => {
                    self.kill();
                    killed_at = Some(Instant::now());
                }
                _ => {}
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        if !self.processes.iter().all(Running::has_succeeded) {
            self.end_orphans(if killed_at.is_none() { grace } else { Duration::ZERO });
        }
        drain_outputs(&self.processes);
        let has_saved = self.processes.iter().any(Running::has_stopped);
        Ok(match (self.requested, stop) {
            (None, Some(_)) => Ended::Failed,
            _ if has_saved => Ended::Stopped(75),
            (Some(signal), Some(Stop { is_own: true, .. })) => Ended::Stopped(128 + signal.as_raw() as u8),
            (Some(_), Some(_)) => Ended::Failed,
            (_, None) => Ended::Done,
        })
    }

    fn job(&self) -> &JobProcesses {
        self.supervisor.watchdog.job()
    }

    /// Ends what failed processes have left behind: it holds files and memory. The ranks of a killed `mpirun` also hold the
    /// lock of the output directory, and may save. Other nodes get no messages meanwhile, so nothing else gets `grace`. What
    /// a rank has detached from the group goes on.
    fn end_orphans(&self, grace: Duration) {
        let are_of_mpirun = self.processes.iter().any(|process| matches!(process.source, Source::Mpirun(_)));
        if are_of_mpirun {
            self.job().signal(Scope::All, Signal::TERM);
            self.job().kill_after(Scope::All, grace);
        } else {
            self.job().kill_after(Scope::Group, Duration::ZERO);
        }
    }

    fn running(&self) -> impl Iterator<Item = &Running> {
        self.processes.iter().filter(|process| process.status.is_none())
    }

    /// Names the processes that still run long after SIGKILL.
    fn unkillable(&self) -> String {
        let left: Vec<u32> = self.running().map(|process| process.child.id()).collect();
        format!(
            "processes {left:?} have not ended {} s after SIGKILL: the kernel keeps them, for a file system or a GPU \
             driver that does not answer; the job is not restarted",
            KILL_TIMEOUT.as_secs()
        )
    }

    /// Returns the failure of the first process that has just ended unsuccessfully, unless the job is stopping, with what
    /// the ranks reported.
    fn first_failure(&mut self, is_stopping: bool) -> Option<RankFailure> {
        let mut first = None;
        for process in &mut self.processes {
            if process.has_just_ended() && !is_stopping && first.is_none() {
                first = process.failure().filter(|_| !process.has_stopped());
            }
        }
        let mut first = first?;
        if let Some(store) = &mut self.store {
            store.poll();
            (first.reported, first.missing) = (store.failure().map(str::to_owned), store.missing());
        }
        Some(first)
    }

    /// Sends SIGTERM to the running processes, unless they are stopping already: a second signal would interrupt their
    /// save.
    fn stop(&self, reason: &str) {
        let others = self.running().count();
        if others > 0 && self.requested.is_none() {
            log_line(format_args!("launch: {reason}; stopping {others} other process(es)"));
            self.send(Signal::TERM);
        }
    }

    /// Forwards a signal. `mpirun` kills its ranks on `SIGTERM` and `SIGINT`, so it gets `SIGUSR1` first, which it forwards
    /// and which makes ranks save and stop. Before they run, there is nothing to save.
    fn forward(&mut self, signal: Signal) {
        let is_first = self.requested.replace(signal).is_none();
        let are_forwarded = self.processes.iter().any(Running::forwards_signals);
        let is_replaced = are_forwarded && is_first && [Signal::TERM, Signal::INT].contains(&signal);
        self.send(if is_replaced { Signal::USR1 } else { signal });
    }

    fn send(&self, signal: Signal) {
        let watchdog = &self.supervisor.watchdog;
        watchdog.send(signal);
        self.processes.iter().for_each(|process| process.send_outside(watchdog.job().group, signal));
    }

    /// Kills all processes of the job, and those that have left the group and replaced their environment.
    fn kill(&mut self) {
        self.job().signal(Scope::All, Signal::KILL);
        self.processes.iter().for_each(|process| process.send_outside(self.job().group, Signal::KILL));
        let running = self.processes.iter_mut().filter(|process| process.status.is_none());
        running.for_each(|process| _ = process.child.kill());
    }
}

impl Drop for Start<'_> {
    /// Kills all processes, if they have not ended.
    fn drop(&mut self) {
        if self.running().next().is_some() {
            self.kill();
            self.job().kill_after(Scope::All, Duration::ZERO);
        }
    }
}
