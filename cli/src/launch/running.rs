//! A running process of a job and its output.

use super::output::{RankLogs, Source, StderrTail, forward_output};
use super::rank_failure::{RankFailure, parse_mpirun};
use anyhow::Context;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, getpgid, kill_process_group};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of polling the readers of output.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum wait for the remaining output of an ended process, and for the end of a killed one.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which the ranks of `mpirun` run, even if they have written nothing.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Exit code of a rank that saved and stopped on a signal.
const STOPPED: i32 = 75;

/// A running process and its output.
pub(super) struct Running {
    pub(super) source: Source,
    pub(super) child: Child,
    stderr: Arc<Mutex<StderrTail>>,
    readers: Vec<JoinHandle<()>>,
    started: Instant,
    pub(super) status: Option<ExitStatus>,
}

impl Running {
    /// Starts a process whose output is forwarded and, if there are `logs`, also written there.
    pub(super) fn start(
        source: Source,
        command: &mut Command,
        logs: Option<&Arc<RankLogs>>,
    ) -> anyhow::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = command.get_program().to_owned();
        let cannot_start = || format!("cannot start {}", program.display());
        let child = command.spawn().with_context(cannot_start)?;
        let (stderr, readers) = (Arc::<Mutex<StderrTail>>::default(), Vec::new());
        // If a reader cannot be started, dropping this ends the process.
        let mut running = Self { source, child, stderr, readers, started: Instant::now(), status: None };
        let stdout = running.child.stdout.take();
        let stdout = stdout.map(|from| forward_output(from, std::io::stdout(), source, None, logs.cloned()));
        let tail = Some(running.stderr.clone());
        let stderr = running.child.stderr.take();
        let stderr = stderr.map(|from| forward_output(from, std::io::stderr(), source, tail, logs.cloned()));
        for reader in stdout.into_iter().chain(stderr) {
            running.readers.push(reader.context("cannot start a thread to read the output of a process")?);
        }
        Ok(running)
    }

    /// Returns whether it has ended since the last call.
    pub(super) fn has_just_ended(&mut self) -> bool {
        if self.status.is_some() {
            return false;
        }
        self.status = self.child.try_wait().ok().flatten();
        self.status.is_some()
    }

    /// Returns whether it is an `mpirun` whose ranks run, so that it forwards signals to them. Earlier it may end by a signal,
    /// or forward it to nobody.
    pub(super) fn forwards_signals(&self) -> bool {
        let run = || !self.stderr.lock().last_lines.is_empty() || self.started.elapsed() > START_TIMEOUT;
        matches!(self.source, Source::Mpirun(_)) && run()
    }

    /// Returns whether it has ended successfully.
    pub(super) fn has_succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// Sends a signal to a process that has moved from the job's group to its own.
    pub(super) fn send_outside(&self, group: Pid, signal: Signal) {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let (None, Some(id)) = (self.status, id)
            && getpgid(Some(id)).is_ok_and(|own| own == id && own != group)
        {
            // An error means that the process has just ended.
            let _ = kill_process_group(id, signal);
        }
    }

    /// Returns the failure of a process that ended unsuccessfully.
    pub(super) fn failure(&self) -> Option<RankFailure> {
        let status = self.status.filter(|status| !status.success())?;
        drain_outputs(std::slice::from_ref(self));
        let stderr = self.stderr.lock();
        Some(match self.source {
            Source::Rank(rank) => RankFailure::new(Some(rank), status, stderr.last_lines.get(&rank).cloned()),
            Source::Mpirun(_) => parse_mpirun(status, &stderr),
        })
    }

    /// Returns whether it saved and stopped on a signal.
    pub(super) fn has_stopped(&self) -> bool {
        self.status.and_then(|status| status.code()) == Some(STOPPED)
    }
}

/// Waits for the remaining output of processes, with a common timeout: child processes may keep the pipes open, and
/// meanwhile other nodes get no messages.
pub(super) fn drain_outputs(processes: &[Running]) {
    let deadline = Instant::now() + DRAIN_TIMEOUT;
    let readers = processes.iter().flat_map(|process| &process.readers);
    while Instant::now() < deadline && !readers.clone().all(JoinHandle::is_finished) {
        std::thread::sleep(POLL_INTERVAL);
    }
}

impl Drop for Running {
    /// Kills it, and waits for its end, but not forever: the kernel can keep a process.
    fn drop(&mut self) {
        if self.status.is_some() {
            return;
        }
        let _ = self.child.kill();
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}
