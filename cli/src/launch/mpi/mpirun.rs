//! Jobs whose ranks the installed `mpirun` starts, on this machine or on several.

use super::hosts::Host;
use crate::launch::output::{MpiLauncher, Source};
use crate::launch::processes::{processes, wait_until};
use crate::launch::running::Running;
use crate::launch::training::SmallerMesh;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Interval of polling the ranks of `mpirun`.
const MPIRUN_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Time limit of `mpirun --version`.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);
/// Environment variables that ranks on other machines get from this one, besides those of the prefixes.
const EXPORTED: [&str; 4] = ["LD_LIBRARY_PATH", "OMP_NUM_THREADS", "RUST_BACKTRACE", "RUST_LOG"];
const EXPORTED_PREFIXES: [&str; 2] = ["NCCL_", "ULYSSES_"];

/// Where `mpirun` starts the ranks.
#[derive(Clone)]
pub(in crate::launch) enum Placement {
    /// This many on this machine.
    Here(usize),
    /// On each host as many as it has slots.
    Hosts(Vec<Host>),
}

/// Returns which `mpirun` is installed: Hydra if it says so, otherwise Open MPI.
pub(super) fn installed() -> MpiLauncher {
    let child = Command::new("mpirun")
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut child) = child else { return MpiLauncher::OpenMpi };
    if wait_until(Instant::now() + VERSION_TIMEOUT, &mut child).is_none() {
        return MpiLauncher::OpenMpi;
    }
    let text = child.wait_with_output().map(|output| output.stdout).unwrap_or_default();
    match String::from_utf8_lossy(&text).contains("HYDRA") {
        true => MpiLauncher::Hydra,
        false => MpiLauncher::OpenMpi,
    }
}

/// Returns the command that starts the ranks.
pub(super) fn command(
    launcher: MpiLauncher,
    placement: &Placement,
    program: &std::path::Path,
    arguments: &[String],
) -> Command {
    let mut command = Command::new("mpirun");
    match launcher {
        MpiLauncher::OpenMpi => open_mpi(&mut command, placement),
        MpiLauncher::Hydra => hydra(&mut command, placement),
    }
    command.arg(program).args(arguments);
    command
}

/// `--bind-to none`: ranks divide the cores themselves.
fn open_mpi(command: &mut Command, placement: &Placement) {
    command.args(["-np", &placement.num_ranks(), "--tag-output", "--bind-to", "none"]);
    let Placement::Hosts(hosts) = placement else {
        command.arg("--oversubscribe");
        return;
    };
    command.args(["--host", &host_list(hosts), "--map-by", "slot"]);
    command.arg("--wdir").arg(working_directory());
    // A host without network is noticed after 5 + 3 · 2 s, by default after hours.
    for (parameter, value) in [("time", "5"), ("intvl", "2"), ("probes", "3")] {
        command.args(["--mca", &format!("oob_tcp_keepalive_{parameter}"), value]);
    }
    for name in exported() {
        command.args(["-x", &name]);
    }
}

fn hydra(command: &mut Command, placement: &Placement) {
    command.args(["-n", &placement.num_ranks(), "-prepend-rank", "-bind-to", "none"]);
    let Placement::Hosts(hosts) = placement else { return };
    command.args(["-hosts", &host_list(hosts)]);
    command.arg("-wdir").arg(working_directory());
    let exported = exported();
    if !exported.is_empty() {
        command.args(["-genvlist", &exported.join(",")]);
    }
}

fn host_list(hosts: &[Host]) -> String {
    hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn working_directory() -> PathBuf {
    std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."))
}

/// Names of this process's variables that the ranks need.
fn exported() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let is_exported = |name: &String| {
        EXPORTED.contains(&name.as_str()) || EXPORTED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    let mut names: Vec<String> = names.filter(is_exported).collect();
    names.sort_unstable();
    names
}

/// Formats a command for a shell.
pub(super) fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let quoted = |word: &std::ffi::OsStr| {
        let word = word.to_string_lossy();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
        match !word.is_empty() && word.chars().all(is_plain) {
            true => word.into_owned(),
            false => format!("'{}'", word.replace('\'', r"'\''")),
        }
    };
    words.map(quoted).collect::<Vec<_>>().join(" ")
}

impl Placement {
    /// Returns the number of ranks on each machine.
    pub(in crate::launch) fn slots(&self) -> std::vec::IntoIter<usize> {
        let slots = match self {
            Self::Here(ranks) => vec![*ranks],
            Self::Hosts(hosts) => hosts.iter().map(|host| host.slots).collect(),
        };
        slots.into_iter()
    }

    /// Returns the placement of the ranks of a smaller mesh: hosts that it does not need are left out.
    pub(super) fn on(&self, mesh: SmallerMesh) -> Self {
        let Self::Hosts(hosts) = self else { return Self::Here(mesh.sizes.num_ranks()) };
        let hosts = hosts.iter().zip(mesh.fill(self.slots())).filter(|(_, slots)| *slots > 0);
        Self::Hosts(hosts.map(|(host, slots)| Host { slots, ..host.clone() }).collect())
    }

    /// Returns whether ranks run on a host.
    pub(super) fn has(&self, name: &str) -> bool {
        matches!(self, Self::Hosts(hosts) if hosts.iter().any(|host| host.name == name))
    }

    fn num_ranks(&self) -> String {
        self.slots().sum::<usize>().to_string()
    }
}

/// Detects an `mpirun` that hangs after its ranks ended, as it may if one is killed.
#[derive(Default)]
pub(in crate::launch) struct MpirunRanks {
    last_poll: Option<Instant>,
    have_started: bool,
    ended_since: Option<Instant>,
}

impl MpirunRanks {
    /// Returns whether `mpirun` has been running for `grace` without ranks, or without reaping one that ended.
    pub(in crate::launch) fn has_outlived_its_ranks(
        &mut self,
        processes: &[Running],
        grace: Duration,
    ) -> bool {
        let is_mpirun =
            |process: &&Running| matches!(process.source, Source::Mpirun(_)) && process.status.is_none();
        let Some(mpirun) = processes.iter().find(is_mpirun) else { return false };
        if self.last_poll.is_some_and(|last| last.elapsed() < MPIRUN_POLL_INTERVAL) {
            return false;
        }
        self.last_poll = Some(Instant::now());
        let mut ranks = self::processes();
        ranks.retain(|process| process.parent == mpirun.child.id());
        self.have_started |= !ranks.is_empty();
        let have_ended = ranks.is_empty() || ranks.iter().any(|rank| rank.is_zombie);
        let since = self.ended_since.unwrap_or_else(Instant::now);
        self.ended_since = (self.have_started && have_ended).then_some(since);
        // Ended ranks are normally reaped at once.
        let grace = grace.max(2 * MPIRUN_POLL_INTERVAL);
        self.ended_since.is_some_and(|since| since.elapsed() >= grace)
    }
}
