//! Starts, supervises and stops the processes of a job.

use super::output::{Source, StderrTail, forward_output};
use super::processes::{Process, processes};
use super::rank_failure::{RankFailure, parse_mpirun};
use super::watchdog::{FORWARDED_SIGNALS, Watchdog};
use crate::log_line;
use anyhow::Context;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, getpgid, kill_process_group};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use ulysses::comm::store::JobStore;

/// Interval of polling the processes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum wait for the remaining output of an ended process.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of polling the ranks of `mpirun`.
const MPIRUN_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Exit code of a rank that saved and stopped on a signal.
const STOPPED: i32 = 75;

/// The processes to start.
pub(super) struct JobSpec {
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
    pub(super) num_processes: usize,
    /// Whether `mpirun` starts the ranks.
    pub(super) uses_mpirun: bool,
    /// Time between SIGTERM and SIGKILL.
    pub(super) grace: Duration,
}

/// The end of a job.
pub(super) enum Outcome {
    Done,
    /// Stopped by a signal.
    Stopped {
        /// 75 if a rank saved, else 128 + signal.
        exit_code: u8,
    },
    Failed(RankFailure),
}

/// A running process and its output.
struct Running {
    source: Source,
    child: Child,
    stderr: Arc<Mutex<StderrTail>>,
    readers: Vec<JoinHandle<()>>,
    status: Option<ExitStatus>,
}

/// Received signals that are to be forwarded.
pub(super) struct Signals {
    pending: Vec<(Signal, Arc<AtomicBool>)>,
}

impl Signals {
    pub(super) fn watch() -> std::io::Result<Self> {
        let watch = |signal: Signal| {
            let is_pending = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(signal.as_raw(), is_pending.clone())?;
            Ok((signal, is_pending))
        };
        let pending = FORWARDED_SIGNALS.into_iter().map(watch);
        Ok(Self { pending: pending.collect::<std::io::Result<_>>()? })
    }

    fn take(&self) -> Vec<Signal> {
        let sent = self.pending.iter().filter(|(_, is_pending)| is_pending.swap(false, Ordering::Relaxed));
        sent.map(|(signal, _)| *signal).collect()
    }
}

impl JobSpec {
    /// Runs the processes to their end. If one fails, the others are stopped.
    pub(super) fn run(&self, signals: &Signals) -> anyhow::Result<Outcome> {
        let store = self.store()?;
        let commands = self.commands(store.as_ref())?;
        let watchdog = Watchdog::start(self.grace)?;
        let mut job = Job { processes: Vec::new(), store, watchdog, grace: self.grace, requested: None };
        // If one cannot be started, dropping the job ends the others.
        for (source, mut command) in commands {
            // A group of its own, so that a terminal's signals arrive only once, through this process.
            command.process_group(job.watchdog.group());
            job.processes.push(Running::start(source, &mut command)?);
        }
        Ok(job.supervise(signals))
    }

    /// Opens the store of the ranks, unless `mpirun` connects them.
    fn store(&self) -> anyhow::Result<Option<JobStore>> {
        if self.uses_mpirun {
            return Ok(None);
        }
        Ok(Some(JobStore::listen(self.num_processes).context("cannot open the store of the job")?))
    }

    fn commands(&self, store: Option<&JobStore>) -> anyhow::Result<Vec<(Source, Command)>> {
        let Some(store) = store else {
            let mut command = Command::new("mpirun");
            command.args(["-np", &self.num_processes.to_string()]);
            // Ranks divide the cores themselves.
            command.args(["--tag-output", "--oversubscribe", "--bind-to", "none"]);
            command.arg(&self.program).args(&self.arguments);
            return Ok(vec![(Source::Mpirun, command)]);
        };
        // PyTorch programs rendezvous at a separate port.
        let (port, size) = (free_port()?.to_string(), self.num_processes.to_string());
        let rank = |rank: usize| {
            let mut command = Command::new(&self.program);
            command.args(&self.arguments);
            command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
            command.env("WORLD_SIZE", &size).env("LOCAL_WORLD_SIZE", &size);
            command.envs(store.environment()).env("MASTER_PORT", &port);
            (Source::Rank(rank), command)
        };
        Ok((0..self.num_processes).map(rank).collect())
    }
}

/// Returns an unused port.
fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

impl Running {
    fn start(source: Source, command: &mut Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = command.get_program().to_owned();
        let cannot_start = || format!("cannot start {}", program.display());
        let child = command.spawn().with_context(cannot_start)?;
        let (stderr, readers) = (Arc::<Mutex<StderrTail>>::default(), Vec::new());
        // If a reader cannot be started, dropping this ends the process.
        let mut running = Self { source, child, stderr, readers, status: None };
        let stdout = running.child.stdout.take();
        let stdout = stdout.map(|from| forward_output(from, std::io::stdout(), source, None));
        let tail = Some(running.stderr.clone());
        let stderr = running.child.stderr.take();
        let stderr = stderr.map(|from| forward_output(from, std::io::stderr(), source, tail));
        for reader in stdout.into_iter().chain(stderr) {
            running.readers.push(reader.context("cannot start a thread to read the output of a process")?);
        }
        Ok(running)
    }

    /// Returns whether it has ended since the last call.
    fn has_just_ended(&mut self) -> bool {
        if self.status.is_some() {
            return false;
        }
        self.status = self.child.try_wait().ok().flatten();
        self.status.is_some()
    }

    /// Sends a signal to a process that has moved from the job's group to its own.
    fn send_outside(&self, group: i32, signal: Signal) {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let (None, Some(id)) = (self.status, id)
            && getpgid(Some(id)).is_ok_and(|own| own == id && own.as_raw_pid() != group)
        {
            // An error means that the process has just ended.
            let _ = kill_process_group(id, signal);
        }
    }

    /// Waits for the remaining output, with a timeout, because child processes may keep the pipe open.
    fn drain_output(&self) {
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        while Instant::now() < deadline && !self.readers.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the failure of a process that ended unsuccessfully.
    fn failure(&self) -> Option<RankFailure> {
        let status = self.status.filter(|status| !status.success())?;
        self.drain_output();
        let stderr = self.stderr.lock();
        Some(match self.source {
            Source::Rank(rank) => RankFailure::new(Some(rank), status, stderr.last_line(rank)),
            Source::Mpirun => parse_mpirun(status, &stderr),
        })
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
    fn supervise(&mut self, signals: &Signals) -> Outcome {
        let mut failed: Option<(RankFailure, Instant)> = None;
        let mut is_killed = false;
        let mut ranks = MpirunRanks::default();
        loop {
            for signal in signals.take() {
                self.forward(signal);
            }
            if let Some(store) = &mut self.store {
                store.poll();
            }
            for index in 0..self.processes.len() {
                if !self.processes[index].has_just_ended() || failed.is_some() {
                    continue;
                }
                let process = &self.processes[index];
                if let Some(failure) = process.failure().filter(|_| !has_stopped(process)) {
                    let failure = self.with_report(failure);
                    self.stop(&failure);
                    failed = Some((failure, Instant::now() + self.grace));
                }
            }
            if self.processes.iter().all(|process| process.status.is_some()) {
                break;
            }
            if let Some((_, deadline)) = &failed
                && Instant::now() > *deadline
                && !std::mem::replace(&mut is_killed, true)
            {
                self.kill();
            }
            if !is_killed && ranks.have_ended(&self.processes, self.grace) {
                let seconds = self.grace.as_secs();
                log_line(format_args!(
                    "launch: killing mpirun, which still runs {seconds} s after its ranks ended"
                ));
                self.kill();
                is_killed = true;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        self.processes.iter().for_each(Running::drain_output);
        let has_saved = self.processes.iter().any(has_stopped);
        match (failed, self.requested) {
            (_, Some(_)) | (None, _) if has_saved => Outcome::Stopped { exit_code: 75 },
            (None, _) => Outcome::Done,
            (Some(_), Some(signal)) => Outcome::Stopped { exit_code: 128 + signal.as_raw() as u8 },
            (Some((failure, _)), None) => Outcome::Failed(failure),
        }
    }

    /// Adds the failure that the ranks reported.
    fn with_report(&mut self, failure: RankFailure) -> RankFailure {
        let Some(store) = &mut self.store else { return failure };
        store.poll();
        failure.with_report(store.failure(), store.missing())
    }

    /// Sends SIGTERM to the running processes, unless they are stopping already: a second signal would interrupt their
    /// save.
    fn stop(&self, failure: &RankFailure) {
        let others: Vec<_> = self.processes.iter().filter(|process| process.status.is_none()).collect();
        if others.is_empty() || self.requested.is_some() {
            return;
        }
        log_line(format_args!("launch: {failure}; stopping {} other process(es)", others.len()));
        self.send(Signal::TERM);
    }

    /// Forwards a signal. `mpirun` kills its ranks on `SIGTERM` and `SIGINT`, so it gets `SIGUSR1` first, which it forwards
    /// and which makes ranks save and stop.
    fn forward(&mut self, signal: Signal) {
        let is_first = self.requested.replace(signal).is_none();
        let is_mpirun = self.processes.iter().any(|process| matches!(process.source, Source::Mpirun));
        let is_replaced = is_mpirun && is_first && [Signal::TERM, Signal::INT].contains(&signal);
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

/// Returns whether a process saved and stopped on a signal.
fn has_stopped(process: &Running) -> bool {
    process.status.and_then(|status| status.code()) == Some(STOPPED)
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

impl Drop for Running {
    fn drop(&mut self) {
        if self.status.is_none() {
            let _ = self.child.kill().and_then(|()| self.child.wait());
        }
    }
}

/// Detects an `mpirun` that hangs after its ranks ended, as it may if one is killed.
#[derive(Default)]
struct MpirunRanks {
    last_poll: Option<Instant>,
    have_started: bool,
    ended_since: Option<Instant>,
}

impl MpirunRanks {
    /// Returns whether `mpirun` has been running for `grace` without ranks, or without reaping one that ended.
    fn have_ended(&mut self, processes: &[Running], grace: Duration) -> bool {
        let is_mpirun =
            |process: &&Running| matches!(process.source, Source::Mpirun) && process.status.is_none();
        let Some(mpirun) = processes.iter().find(is_mpirun) else { return false };
        if self.last_poll.is_some_and(|last| last.elapsed() < MPIRUN_POLL_INTERVAL) {
            return false;
        }
        self.last_poll = Some(Instant::now());
        self.update(&self::processes(), mpirun.child.id());
        // Ended ranks are normally reaped at once.
        let grace = grace.max(2 * MPIRUN_POLL_INTERVAL);
        self.ended_since.is_some_and(|since| since.elapsed() >= grace)
    }

    fn update(&mut self, all: &[Process], mpirun: u32) {
        let ranks: Vec<&Process> = all.iter().filter(|process| process.parent == mpirun).collect();
        self.have_started |= !ranks.is_empty();
        let have_ended = ranks.is_empty() || ranks.iter().any(|rank| rank.is_zombie);
        match self.have_started && have_ended {
            true => self.ended_since = self.ended_since.or_else(|| Some(Instant::now())),
            false => self.ended_since = None,
        }
    }
}
