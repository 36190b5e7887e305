//! Starts, supervises and stops the processes of a job on this machine.

use super::mpi::mpirun::MpirunRanks;
use super::output::{RankLogs, Source};
use super::processes::end_marked;
use super::rank_failure::RankFailure;
use super::running::{Running, drain_outputs};
use super::signals::Signals;
use super::watchdog::Watchdog;
use crate::output::log_line;
use anyhow::anyhow;
use rustix::process::Signal;
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

/// Environment variable by which the processes of a start are found. Its value is the process group of the watchdog.
const MARK: &str = "ULYSSES_LAUNCH";

/// One start of the processes of this machine.
pub(super) struct Start {
    pub(super) commands: Vec<(Source, Command)>,
    /// The store of the ranks, if this process hosts it.
    pub(super) store: Option<JobStore>,
    /// Time between SIGTERM and SIGKILL.
    pub(super) grace: Duration,
    /// Files that get the output of each rank too, if wanted.
    pub(super) logs: Option<Arc<RankLogs>>,
}

/// The end of the processes of this machine.
pub(super) enum Outcome {
    Done,
    /// Stopped by a signal.
    Stopped {
        /// 75 if a rank saved, else 128 + signal.
        exit_code: u8,
    },
    Failed(RankFailure),
    /// Stopped because another node failed.
    Interrupted,
}

/// The other nodes of a job.
pub(super) trait OtherNodes {
    /// Reports that a rank of this node failed.
    fn report(&mut self, failure: &RankFailure);
    /// Returns why the ranks of this node are to be stopped, if they are. Polled all the time.
    fn poll(&mut self, store: Option<&JobStore>) -> Option<String>;
}

/// The other nodes of a job on one machine.
pub(super) struct NoOtherNodes;

impl OtherNodes for NoOtherNodes {
    fn report(&mut self, _failure: &RankFailure) {}

    fn poll(&mut self, _store: Option<&JobStore>) -> Option<String> {
        None
    }
}

impl Start {
    /// Runs the processes to their end. If one fails, here or on another node, the others are stopped.
    pub(super) fn run(self, signals: &Signals, nodes: &mut dyn OtherNodes) -> anyhow::Result<Outcome> {
        let Self { commands, store, grace, logs } = self;
        let watchdog = Watchdog::start(grace, None)?;
        let mut job = Job { processes: Vec::new(), store, watchdog, grace, requested: None };
        // If one cannot be started, dropping the job ends the others.
        for (source, mut command) in commands {
            // A group of its own, so that a terminal's signals arrive only once, through this process.
            command.process_group(job.watchdog.group());
            command.env(MARK, job.watchdog.group().to_string());
            job.processes.push(Running::start(source, &mut command, logs.as_ref())?);
        }
        job.supervise(signals, nodes)
    }
}

/// The processes of a running job.
struct Job {
    processes: Vec<Running>,
    store: Option<JobStore>,
    watchdog: Watchdog,
    grace: Duration,
    /// The last signal that asked the job to stop, if any.
    requested: Option<Signal>,
}

impl Job {
    fn supervise(&mut self, signals: &Signals, nodes: &mut dyn OtherNodes) -> anyhow::Result<Outcome> {
        let mut failed: Option<RankFailure> = None;
        let mut is_interrupted = false;
        let mut killed_at: Option<Instant> = None;
        let mut deadline: Option<Instant> = None;
        let mut ranks = MpirunRanks::default();
        loop {
            for signal in signals.take() {
                self.forward(signal);
            }
            if let Some(store) = &mut self.store {
                store.poll();
            }
            let is_stopping = deadline.is_some();
            if let Some(failure) = self.first_failure(is_stopping) {
                nodes.report(&failure);
                self.stop(&failure);
                failed = Some(failure);
                deadline = Some(Instant::now() + self.grace);
            }
            if let Some(reason) = nodes.poll(self.store.as_ref())
                && deadline.is_none()
            {
                self.stop(&reason);
                is_interrupted = true;
                deadline = Some(Instant::now() + self.grace);
            }
            if self.processes.iter().all(|process| process.status.is_some()) {
                break;
            }
            if killed_at.is_none() && deadline.is_some_and(|deadline| Instant::now() > deadline) {
                self.kill();
                killed_at = Some(Instant::now());
            }
            if let Some(unkillable) = killed_at.and_then(|at| self.unkillable(at)) {
                // A restart would need the memory and the GPU that such a process still has.
                let cause = failed.map_or(String::new(), |failure| format!("{failure}; "));
                return Err(anyhow!("{cause}{unkillable}"));
            }
            if killed_at.is_none() && ranks.have_ended(&self.processes, self.grace) {
                let seconds = self.grace.as_secs();
                log_line(format_args!(
                    "launch: killing mpirun, which still runs {seconds} s after its ranks ended"
                ));
                self.kill();
                killed_at = Some(Instant::now());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        if self.processes.iter().any(Running::is_failed_mpirun) {
            // Its ranks may be orphans that still hold files, memory and the lock of the output directory.
            end_marked(&format!("{MARK}={}", self.watchdog.group()), self.grace);
        }
        drain_outputs(&self.processes);
        let has_saved = self.processes.iter().any(Running::has_stopped);
        Ok(match (failed, self.requested) {
            (None, None) if is_interrupted => Outcome::Interrupted,
            (_, Some(_)) | (None, _) if has_saved => Outcome::Stopped { exit_code: 75 },
            (Some(_), Some(signal)) => Outcome::Stopped { exit_code: 128 + signal.as_raw() as u8 },
            (None, _) if is_interrupted => Outcome::Interrupted,
            (None, _) => Outcome::Done,
            (Some(failure), None) => Outcome::Failed(failure),
        })
    }

    /// Names the processes that still run long after SIGKILL.
    fn unkillable(&self, killed_at: Instant) -> Option<String> {
        let left: Vec<u32> = self
            .processes
            .iter()
            .filter(|process| process.status.is_none())
            .map(|process| process.child.id())
            .collect();
        (killed_at.elapsed() > KILL_TIMEOUT && !left.is_empty()).then(|| {
            format!(
                "processes {left:?} have not ended {} s after SIGKILL: the kernel keeps them, for a file system or a GPU \
                 driver that does not answer; the job is not restarted",
                KILL_TIMEOUT.as_secs()
            )
        })
    }

    /// Returns the failure of the first process that has just ended unsuccessfully, unless the job is stopping.
    fn first_failure(&mut self, is_stopping: bool) -> Option<RankFailure> {
        let mut first = None;
        for index in 0..self.processes.len() {
            if !self.processes[index].has_just_ended() || is_stopping || first.is_some() {
                continue;
            }
            let process = &self.processes[index];
            first = process.failure().filter(|_| !process.has_stopped());
        }
        first.map(|failure| self.with_report(failure))
    }

    /// Adds the failure that the ranks reported.
    fn with_report(&mut self, failure: RankFailure) -> RankFailure {
        let Some(store) = &mut self.store else { return failure };
        store.poll();
        failure.with_report(store.failure(), store.missing())
    }

    /// Sends SIGTERM to the running processes, unless they are stopping already: a second signal would interrupt their
    /// save.
    fn stop(&self, reason: &impl std::fmt::Display) {
        let others: Vec<_> = self.processes.iter().filter(|process| process.status.is_none()).collect();
        if others.is_empty() || self.requested.is_some() {
            return;
        }
        log_line(format_args!("launch: {reason}; stopping {} other process(es)", others.len()));
        self.send(Signal::TERM);
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
        self.watchdog.send(signal);
        self.processes.iter().for_each(|process| process.send_outside(self.watchdog.group(), signal));
    }

    fn kill(&self) {
        self.watchdog.kill_all();
        self.processes.iter().for_each(|process| process.send_outside(self.watchdog.group(), Signal::KILL));
    }
}

impl Drop for Job {
    /// Kills all processes, unless all succeeded.
    fn drop(&mut self) {
        if self.processes.iter().all(|process| process.status.is_some_and(|status| status.success())) {
            // Background processes of a successful job may continue.
            return self.watchdog.dismiss();
        }
        self.kill();
    }
}
