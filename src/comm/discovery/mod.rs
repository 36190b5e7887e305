//! Process discovery: rank and world size of this process, from flags and from the environment variables of launchers.
//!
//! Launchers nest: `srun` starts one `torchrun` per node, which starts one process per GPU. Several of them
//! may have set their variables. Launchers that number the processes of the job must agree.

mod hosts;
mod launcher;
mod slurm;
#[cfg(test)]
mod tests;

pub use hosts::{HOSTS_VARIABLE, host_name, stated_hosts};
pub use launcher::Launcher;
pub(super) use slurm::first_host;

use launcher::{LauncherInfo, launcher_infos};
use std::fmt;

/// Rank and world size of a process within its job.
///
/// ```
/// use ulysses::comm::{Launcher, ProcessInfo, ProcessFlags};
///
/// let environment = [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4")];
/// let lookup = |name: &str| environment.iter().find(|(set, _)| *set == name).map(|(_, value)| value.to_string());
/// let world = ProcessInfo::discover(&ProcessFlags::default(), lookup)?;
/// assert_eq!((world.rank, world.world_size, world.launcher), (3, 4, Launcher::OpenMpi));
/// # Ok::<(), ulysses::comm::DiscoveryError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessInfo {
    /// Rank of this process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// Rank of this process on its node, where known; the index of its GPU.
    pub local_rank: Option<usize>,
    /// Number of processes on this node, where known.
    pub local_world_size: Option<usize>,
    /// The source of these values. If several agree, the launcher that started the process itself.
    pub launcher: Launcher,
}

/// Flags on the command line. Launcher variables supply what they leave out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessFlags {
    /// `--rank`.
    pub rank: Option<usize>,
    /// `--world-size`.
    pub world_size: Option<usize>,
    /// `--local-rank`.
    pub local_rank: Option<usize>,
}

/// A number, and the flag or variable that it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedValue {
    /// Name of the flag or variable.
    pub name: &'static str,
    /// Its value.
    pub value: usize,
}

impl fmt::Display for NamedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

/// An error of process discovery.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoveryError {
    /// A variable is not a number.
    #[error("{name} is `{value}`, expected a non-negative integer")]
    NotANumber {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// Rank without world size, or world size without rank.
    #[error(
        "{missing} is not set, but {given} is; {launcher} sets both, and also LOCAL_RANK or its equivalent"
    )]
    Incomplete {
        /// The launcher.
        launcher: Launcher,
        /// The variable that is set.
        given: NamedValue,
        /// The variable that is missing.
        missing: &'static str,
    },
    /// A rank that is not below the world size.
    #[error("{} is {}, must be less than {} ({})", rank.name, rank.value, size.name, size.value)]
    OutOfRange {
        /// The rank.
        rank: NamedValue,
        /// The number of ranks.
        size: NamedValue,
    },
    /// Hosts that are not one per rank.
    #[error("ULYSSES_HOSTS has {hosts} host(s) for {ranks} rank(s); give one per rank, separated by commas")]
    HostCount {
        /// Number of hosts.
        hosts: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// Two sources that contradict each other.
    #[error(
        "{} ({first_source}) and {} ({second_source}) contradict each other on the {what} of this process: unset \
         the one left over from another launcher",
        first,
        second
    )]
    Disagreement {
        /// `rank`, `world size`, `local rank` or `local world size`.
        what: &'static str,
        /// The first value.
        first: NamedValue,
        /// Source of the first value.
        first_source: Launcher,
        /// The second value.
        second: NamedValue,
        /// Source of the second value.
        second_source: Launcher,
    },
}

impl ProcessInfo {
    /// Discovers this process from the flags and from the variables of torchrun, Open MPI, PMI (MPICH, Intel MPI) and
    /// SLURM, which `lookup` returns. Without any of them it is a single process.
    ///
    /// A launcher that started one process per node, and fewer than the launcher inside it, started that launcher's
    /// agents: its numbers belong to the agents, and are not compared.
    ///
    /// # Errors
    /// [`DiscoveryError`]: values that are not numbers, are missing, or contradict each other.
    pub fn discover(
        flags: &ProcessFlags,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, DiscoveryError> {
        let launcher_infos = launcher_infos(flags, lookup)?;
        for (index, inner) in launcher_infos.iter().enumerate() {
            for outer in &launcher_infos[index + 1..] {
                compare(inner, outer)?;
            }
        }
        let rank = launcher_infos.iter().find_map(|info| Some((info.rank.as_ref()?, info)));
        let size = launcher_infos.iter().find_map(|info| info.world_size.as_ref());
        let local_rank = launcher_infos.iter().find_map(|info| info.local_rank.as_ref());
        let local_world_size = launcher_infos.iter().find_map(|info| info.local_world_size.as_ref());
        let (Some((rank, info)), Some(size)) = (rank, size) else {
            return incomplete(rank.map(|(rank, _)| rank), size);
        };
        below(rank, size)?;
        if let (Some(rank), Some(size)) = (local_rank, local_world_size) {
            below(rank, size)?;
        }
        Ok(Self {
            rank: rank.value,
            world_size: size.value,
            local_rank: local_rank.map(|named| named.value),
            local_world_size: local_world_size.map(|named| named.value),
            launcher: info.launcher,
        })
    }

    /// As [`discover`](Self::discover), from this process's environment, without flags.
    ///
    /// # Errors
    /// As for [`discover`](Self::discover).
    pub fn from_env() -> Result<Self, DiscoveryError> {
        Self::discover(&ProcessFlags::default(), |name| std::env::var(name).ok())
    }

    /// A process that is the only one of its job.
    pub fn alone() -> Self {
        Self { rank: 0, world_size: 1, local_rank: None, local_world_size: None, launcher: Launcher::None }
    }
}

/// Without rank and size the process is the only one; one without the other is an error.
fn incomplete(rank: Option<&NamedValue>, size: Option<&NamedValue>) -> Result<ProcessInfo, DiscoveryError> {
    let (given, missing) = match (rank, size) {
        (Some(rank), _) => (rank, "--world-size"),
        (None, Some(size)) => (size, "--rank"),
        (None, None) => return Ok(ProcessInfo::alone()),
    };
    Err(DiscoveryError::Incomplete { launcher: Launcher::Flags, given: given.clone(), missing })
}

fn below(rank: &NamedValue, size: &NamedValue) -> Result<(), DiscoveryError> {
    if rank.value < size.value {
        return Ok(());
    }
    Err(DiscoveryError::OutOfRange { rank: rank.clone(), size: size.clone() })
}

fn compare(inner: &LauncherInfo, outer: &LauncherInfo) -> Result<(), DiscoveryError> {
    if outer.has_started_agents_of(inner) {
        return Ok(());
    }
    let pairs = [
        ("world size", &inner.world_size, &outer.world_size),
        ("rank", &inner.rank, &outer.rank),
        ("local rank", &inner.local_rank, &outer.local_rank),
        ("local world size", &inner.local_world_size, &outer.local_world_size),
    ];
    for (what, first, second) in pairs {
        if let (Some(first), Some(second)) = (first, second)
            && first.value != second.value
        {
            return Err(DiscoveryError::Disagreement {
                what,
                first: first.clone(),
                first_source: inner.launcher,
                second: second.clone(),
                second_source: outer.launcher,
            });
        }
    }
    Ok(())
}
