//! Who this process is among those of a job: from flags, and from what launchers put into the environment.
//!
//! Launchers nest: `srun` starts one `torchrun` on each node, which starts a process for each GPU. So several
//! may have left their variables. Those that number the processes of the job must agree.

mod launcher;
mod slurm;
#[cfg(test)]
mod tests;

pub use launcher::Launcher;
pub(super) use slurm::first_host;

use launcher::{Claim, claims};
use std::fmt;

/// A process among those of a job.
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
    /// This process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// This process among those of its node, where that is known; the index of its GPU.
    pub local_rank: Option<usize>,
    /// Number of processes on this node, where that is known.
    pub local_world_size: Option<usize>,
    /// Who says so. Of several that agree, the one that started the process itself.
    pub launcher: Launcher,
}

/// What the command line says of the process. What it leaves out, a launcher's variables say.
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
pub struct Stated {
    /// The flag or the variable.
    pub name: &'static str,
    /// Its value.
    pub value: usize,
}

impl fmt::Display for Stated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

/// Why it is not known who this process is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoveryError {
    /// A variable that should be a number.
    #[error("{name} is `{value}`, expected a number from 0 up")]
    NotANumber {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// One of rank and world size without the other.
    #[error(
        "{missing} is not set, but {given} is; {launcher} sets both, and LOCAL_RANK or what stands for it"
    )]
    Incomplete {
        /// Who sets them.
        launcher: Launcher,
        /// What there is.
        given: Stated,
        /// What is missing.
        missing: &'static str,
    },
    /// A rank that the world does not have.
    #[error("{} is {}, expected less than {}, {}", rank.name, rank.value, size.name, size.value)]
    OutOfRange {
        /// The rank.
        rank: Stated,
        /// The number of ranks.
        size: Stated,
    },
    /// Two sources that say different things.
    #[error(
        "{} ({first_source}) and {} ({second_source}) contradict each other about the {what} of this process: unset \
         the one that is left over from another launcher",
        first,
        second
    )]
    Disagreement {
        /// `rank`, `world size`, `local rank` or `local world size`.
        what: &'static str,
        /// One of them.
        first: Stated,
        /// Whose it is.
        first_source: Launcher,
        /// The other.
        second: Stated,
        /// Whose it is.
        second_source: Launcher,
    },
}

impl ProcessInfo {
    /// Who this process is: by the flags, by torchrun's variables, Open MPI's, those of PMI (MPICH, Intel MPI) and
    /// those of SLURM, which `lookup` returns. Without any of them it is alone.
    ///
    /// A launcher that has started one process on each node, and fewer than the one after it, has started that one's
    /// agents: its numbers are those of the agents, and are not compared.
    ///
    /// # Errors
    /// [`DiscoveryError`]: numbers that are none, that are missing, or that contradict each other.
    pub fn discover(
        flags: &ProcessFlags,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, DiscoveryError> {
        let claims = claims(flags, lookup)?;
        for (index, inner) in claims.iter().enumerate() {
            for outer in &claims[index + 1..] {
                compare(inner, outer)?;
            }
        }
        let rank = claims.iter().find_map(|claim| Some((claim.rank.as_ref()?, claim)));
        let size = claims.iter().find_map(|claim| claim.world_size.as_ref());
        let local_rank = claims.iter().find_map(|claim| claim.local_rank.as_ref());
        let local_world_size = claims.iter().find_map(|claim| claim.local_world_size.as_ref());
        let (Some((rank, claim)), Some(size)) = (rank, size) else {
            return incomplete(rank.map(|(rank, _)| rank), size);
        };
        below(rank, size)?;
        if let (Some(rank), Some(size)) = (local_rank, local_world_size) {
            below(rank, size)?;
        }
        Ok(Self {
            rank: rank.value,
            world_size: size.value,
            local_rank: local_rank.map(|stated| stated.value),
            local_world_size: local_world_size.map(|stated| stated.value),
            launcher: claim.launcher,
        })
    }

    /// As [`discover`](Self::discover), from this process's environment and without flags.
    ///
    /// # Errors
    /// As there.
    pub fn from_env() -> Result<Self, DiscoveryError> {
        Self::discover(&ProcessFlags::default(), |name| std::env::var(name).ok())
    }

    /// A process that nobody has started as one of several.
    pub fn alone() -> Self {
        Self { rank: 0, world_size: 1, local_rank: None, local_world_size: None, launcher: Launcher::None }
    }
}

/// Without a rank and without a size the process is alone; one of them alone is a mistake.
fn incomplete(rank: Option<&Stated>, size: Option<&Stated>) -> Result<ProcessInfo, DiscoveryError> {
    let (given, missing) = match (rank, size) {
        (Some(rank), _) => (rank, "--world-size"),
        (None, Some(size)) => (size, "--rank"),
        (None, None) => return Ok(ProcessInfo::alone()),
    };
    Err(DiscoveryError::Incomplete { launcher: Launcher::Flags, given: given.clone(), missing })
}

fn below(rank: &Stated, size: &Stated) -> Result<(), DiscoveryError> {
    if rank.value < size.value {
        return Ok(());
    }
    Err(DiscoveryError::OutOfRange { rank: rank.clone(), size: size.clone() })
}

fn compare(inner: &Claim, outer: &Claim) -> Result<(), DiscoveryError> {
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
