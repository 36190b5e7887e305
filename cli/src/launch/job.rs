//! The processes of a job: started, watched, stopped.

use super::fault::{Fault, of_mpirun};
use super::output::{Said, Speaker, pass_on};
use super::processes::{Process, processes};
use super::watchdog::{PASSED_ON, Watchdog};
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

/// Between two looks at the processes.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long the last lines of a process that has ended may take to arrive.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Between two looks at the ranks of `mpirun`.
const LOOK_AT_RANKS_EVERY: Duration = Duration::from_millis(500);
/// The exit code of a rank that a signal has asked to save and end.
const STOPPED: i32 = 75;

/// What to start.
pub(super) struct Plan {
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
    pub(super) num_processes: usize,
    /// Lets `mpirun` start them.
    pub(super) by_mpirun: bool,
    /// Between asking processes to end and killing them.
    pub(super) grace: Duration,
}

/// How a job ended.
pub(super) enum Outcome {
    Done,
    /// A signal has asked it to.
    Stopped {
        /// 75 when a rank has saved what it had, else 128 and the signal.
        exit_code: u8,
    },
    Failed(Fault),
}

/// A process and what it says.
struct Running {
    speaker: Speaker,
    child: Child,
    said: Arc<Mutex<Said>>,
    readers: Vec<JoinHandle<()>>,
    status: Option<ExitStatus>,
}

/// Signals that this process has been sent, to be passed on.
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
        let pending = PASSED_ON.into_iter().map(watch);
        Ok(Self { pending: pending.collect::<std::io::Result<_>>()? })
    }

    fn take(&self) -> Vec<Signal> {
        let sent = self.pending.iter().filter(|(_, is_pending)| is_pending.swap(false, Ordering::Relaxed));
        sent.map(|(signal, _)| *signal).collect()
    }
}

impl Plan {
    /// Runs the processes to their end. When one fails, the others are stopped.
    pub(super) fn run(&self, signals: &Signals) -> anyhow::Result<Outcome> {
        let store = self.store()?;
        let commands = self.commands(store.as_ref())?;
        let watchdog = Watchdog::start(self.grace)?;
        let mut job = Job { processes: Vec::new(), store, watchdog, grace: self.grace, asked: None };
        // If one cannot be started, dropping the job ends the others.
        for (speaker, mut command) in commands {
            // Not this process's group: a terminal's signals come from us only, once.
            command.process_group(job.watchdog.group());
            job.processes.push(Running::start(speaker, &mut command)?);
        }
        Ok(job.supervise(signals))
    }

    /// What ranks share that `mpirun` does not connect.
    fn store(&self) -> anyhow::Result<Option<JobStore>> {
        if self.by_mpirun {
            return Ok(None);
        }
        Ok(Some(JobStore::listen(self.num_processes).context("cannot host the store of the job's ranks")?))
    }

    fn commands(&self, store: Option<&JobStore>) -> anyhow::Result<Vec<(Speaker, Command)>> {
        let Some(store) = store else {
            let mut command = Command::new("mpirun");
            command.args(["-np", &self.num_processes.to_string()]);
            // Ranks share the cores by themselves.
            command.args(["--tag-output", "--oversubscribe", "--bind-to", "none"]);
            command.arg(&self.program).args(&self.arguments);
            return Ok(vec![(Speaker::Mpirun, command)]);
        };
        // Torch's programs meet at a port of their own.
        let (port, size) = (free_port()?.to_string(), self.num_processes.to_string());
        let rank = |rank: usize| {
            let mut command = Command::new(&self.program);
            command.args(&self.arguments);
            command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
            command.env("WORLD_SIZE", &size).env("LOCAL_WORLD_SIZE", &size);
            command.envs(store.environment()).env("MASTER_PORT", &port);
            (Speaker::Rank(rank), command)
        };
        Ok((0..self.num_processes).map(rank).collect())
    }
}

/// A port that nobody listens on.
fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

impl Running {
    fn start(speaker: Speaker, command: &mut Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = command.get_program().to_owned();
        let cannot_start = || format!("cannot start {}", program.display());
        let child = command.spawn().with_context(cannot_start)?;
        let (said, readers) = (Arc::<Mutex<Said>>::default(), Vec::new());
        // A process that nobody reads is none that runs: dropping it ends it.
        let mut running = Self { speaker, child, said, readers, status: None };
        let stdout = running.child.stdout.take().map(|from| pass_on(from, std::io::stdout(), speaker, None));
        let said = Some(running.said.clone());
        let stderr = running.child.stderr.take().map(|from| pass_on(from, std::io::stderr(), speaker, said));
        for reader in stdout.into_iter().chain(stderr) {
            running.readers.push(reader.context("cannot start a thread that reads what a process says")?);
        }
        Ok(running)
    }

    /// Whether it has ended since it was last looked at.
    fn has_just_ended(&mut self) -> bool {
        if self.status.is_some() {
            return false;
        }
        self.status = self.child.try_wait().ok().flatten();
        self.status.is_some()
    }

    /// Sends a signal to a process that has left the group of the job for one of its own.
    fn send_outside(&self, group: i32, signal: Signal) {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let (None, Some(id)) = (self.status, id)
            && getpgid(Some(id)).is_ok_and(|own| own == id && own.as_raw_pid() != group)
        {
            // One that has just ended needs no signal.
            let _ = kill_process_group(id, signal);
        }
    }

    /// Waits for what it has said last. What it has started itself may hold its output open for ever.
    fn hear_out(&self) {
        let deadline = Instant::now() + LAST_WORDS;
        while Instant::now() < deadline && !self.readers.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Why it ended, if it did not do its work.
    fn fault(&self) -> Option<Fault> {
        let status = self.status.filter(|status| !status.success())?;
        self.hear_out();
        let said = self.said.lock();
        Some(match self.speaker {
            Speaker::Rank(rank) => Fault::new(Some(rank), status, said.last_of(rank)),
            Speaker::Mpirun => of_mpirun(status, &said),
        })
    }
}

/// Processes under way.
struct Job {
    processes: Vec<Running>,
    store: Option<JobStore>,
    watchdog: Watchdog,
    grace: Duration,
    /// The signal that asked for the end, if one did.
    asked: Option<Signal>,
}

impl Job {
    fn supervise(&mut self, signals: &Signals) -> Outcome {
        let mut failed: Option<(Fault, Instant)> = None;
        let mut is_killed = false;
        let mut ranks = RanksOfMpirun::default();
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
                if let Some(fault) = process.fault().filter(|_| !has_stopped(process)) {
                    let fault = self.with_report(fault);
                    self.stop(&fault);
                    failed = Some((fault, Instant::now() + self.grace));
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
                log_line(format_args!("launch: mpirun has not ended {seconds} s after its ranks; killing it"));
                self.kill();
                is_killed = true;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.processes.iter().for_each(Running::hear_out);
        let has_saved = self.processes.iter().any(has_stopped);
        match (failed, self.asked) {
            (_, Some(_)) | (None, _) if has_saved => Outcome::Stopped { exit_code: 75 },
            (None, _) => Outcome::Done,
            (Some(_), Some(signal)) => Outcome::Stopped { exit_code: 128 + signal.as_raw() as u8 },
            (Some((fault, _)), None) => Outcome::Failed(fault),
        }
    }

    /// The same, with what the ranks have reported.
    fn with_report(&mut self, fault: Fault) -> Fault {
        let Some(store) = &mut self.store else { return fault };
        store.poll();
        fault.with_report(store.failure(), store.missing())
    }

    /// Asks those that still run to end, unless a signal has asked them before: a second one would cut short what they
    /// do about the first.
    fn stop(&self, fault: &Fault) {
        let others: Vec<_> = self.processes.iter().filter(|process| process.status.is_none()).collect();
        if others.is_empty() || self.asked.is_some() {
            return;
        }
        log_line(format_args!("launch: {fault}; stopping the {} other(s)", others.len()));
        self.send(Signal::TERM);
    }

    /// `mpirun` ends its ranks on `SIGTERM` and `SIGINT`, but passes `SIGUSR1` on, which ours take for the same: save and end.
    fn forward(&mut self, signal: Signal) {
        let is_first = self.asked.replace(signal).is_none();
        let is_mpirun = self.processes.iter().any(|process| matches!(process.speaker, Speaker::Mpirun));
        let softened = is_mpirun && is_first && [Signal::TERM, Signal::INT].contains(&signal);
        self.send(if softened { Signal::USR1 } else { signal });
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

/// Whether a process has ended because it was asked to.
fn has_stopped(process: &Running) -> bool {
    process.status.and_then(|status| status.code()) == Some(STOPPED)
}

impl Drop for Job {
    /// No process outlives the job.
    fn drop(&mut self) {
        if self.processes.iter().all(|process| process.status.is_some_and(|status| status.success())) {
            // What a process that did its work has left running may go on.
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

/// Whether an `mpirun` still has ranks, from look to look. It may hang when one is killed.
#[derive(Default)]
struct RanksOfMpirun {
    looked: Option<Instant>,
    have_been_seen: bool,
    ended_since: Option<Instant>,
}

impl RanksOfMpirun {
    /// Whether `mpirun` runs although for as long as `grace` none of its ranks has, or it has not taken note of the end
    /// of one.
    fn have_ended(&mut self, processes: &[Running], grace: Duration) -> bool {
        let is_mpirun =
            |process: &&Running| matches!(process.speaker, Speaker::Mpirun) && process.status.is_none();
        let Some(mpirun) = processes.iter().find(is_mpirun) else { return false };
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_AT_RANKS_EVERY) {
            return false;
        }
        self.looked = Some(Instant::now());
        self.look(&self::processes(), mpirun.child.id());
        // Ranks that have ended are taken note of within moments.
        let grace = grace.max(2 * LOOK_AT_RANKS_EVERY);
        self.ended_since.is_some_and(|since| since.elapsed() >= grace)
    }

    fn look(&mut self, all: &[Process], mpirun: u32) {
        let ranks: Vec<&Process> = all.iter().filter(|process| process.parent == mpirun).collect();
        self.have_been_seen |= !ranks.is_empty();
        let have_ended = ranks.is_empty() || ranks.iter().any(|rank| rank.is_zombie);
        match self.have_been_seen && have_ended {
            true => self.ended_since = self.ended_since.or_else(|| Some(Instant::now())),
            false => self.ended_since = None,
        }
    }
}
