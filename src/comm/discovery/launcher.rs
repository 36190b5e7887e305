//! The environment variables of each launcher.

use super::slurm::tasks_on_node;
use super::{DiscoveryError, NamedValue, ProcessFlags};
use std::fmt;

/// The launcher of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// No launcher.
    None,
    /// Flags on the command line.
    Flags,
    /// torchrun, `ulysses launch`, or anything else that sets `RANK` and `WORLD_SIZE`.
    Torchrun,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// Hydra, the `mpiexec` of MPICH and Intel MPI, or another launcher that uses PMI.
    Pmi,
    /// `srun`.
    Slurm,
}

impl Launcher {
    /// Returns whether its processes find each other through MPI.
    pub fn uses_mpi(self) -> bool {
        matches!(self, Self::OpenMpi | Self::Pmi | Self::Slurm)
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "no launcher",
            Self::Flags => "command line",
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI",
            Self::Slurm => "SLURM",
        })
    }
}

/// Rank and sizes that one source states.
pub(super) struct LauncherInfo {
    pub(super) launcher: Launcher,
    pub(super) rank: Option<NamedValue>,
    pub(super) world_size: Option<NamedValue>,
    pub(super) local_rank: Option<NamedValue>,
    pub(super) local_world_size: Option<NamedValue>,
}

impl LauncherInfo {
    /// Returns whether this launcher started one agent per node, and these started the processes of
    /// `inner`. Its numbers then say nothing about this process.
    pub(super) fn has_started_agents_of(&self, inner: &LauncherInfo) -> bool {
        let is_alone_on_node = self.local_world_size.as_ref().is_some_and(|size| size.value == 1);
        let has_fewer = match (&self.world_size, &inner.world_size) {
            (Some(own), Some(inner)) => own.value < inner.value,
            _ => false,
        };
        is_alone_on_node && has_fewer
    }
}

/// Names of a launcher's variables.
struct Variables {
    launcher: Launcher,
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    local_world_size: &'static str,
    /// Whether rank without size, or size without rank, is an error rather than another program's variable.
    required_together: bool,
}

/// Innermost first: a launcher may have been started by a later one.
const LAUNCHERS: [Variables; 3] = [
    Variables {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world_size: "LOCAL_WORLD_SIZE",
        required_together: true,
    },
    Variables {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        required_together: true,
    },
    // MPICH's and Intel MPI's Hydra set all four.
    Variables {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_world_size: "MPI_LOCALNRANKS",
        required_together: false,
    },
];

/// Returns the statements of the flags and of every launcher that is present, innermost first.
pub(super) fn launcher_infos(
    flags: &ProcessFlags,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<Vec<LauncherInfo>, DiscoveryError> {
    let named = |name, value: Option<usize>| value.map(|value| NamedValue { name, value });
    let mut launcher_infos = vec![LauncherInfo {
        launcher: Launcher::Flags,
        rank: named("--rank", flags.rank),
        world_size: named("--world-size", flags.world_size),
        local_rank: named("--local-rank", flags.local_rank),
        local_world_size: None,
    }];
    for variables in &LAUNCHERS {
        launcher_infos.extend(launcher_info(variables, &lookup)?);
    }
    launcher_infos.extend(slurm(&lookup)?);
    Ok(launcher_infos)
}

fn launcher_info(
    variables: &Variables,
    lookup: &impl Fn(&str) -> Option<String>,
) -> Result<Option<LauncherInfo>, DiscoveryError> {
    let launcher = variables.launcher;
    let rank = number(variables.rank, lookup)?;
    let world_size = number(variables.world_size, lookup)?;
    match (&rank, &world_size) {
        (Some(_), Some(_)) => {}
        (Some(given), None) if variables.required_together => {
            let missing = variables.world_size;
            return Err(DiscoveryError::Incomplete { launcher, given: given.clone(), missing });
        }
        (None, Some(given)) if variables.required_together => {
            let missing = variables.rank;
            return Err(DiscoveryError::Incomplete { launcher, given: given.clone(), missing });
        }
        _ => return Ok(None),
    }
    let local_rank = number(variables.local_rank, lookup)?;
    let local_world_size = number(variables.local_world_size, lookup)?;
    Ok(Some(LauncherInfo { launcher, rank, world_size, local_rank, local_world_size }))
}

/// A batch script has `SLURM_PROCID` and `SLURM_NTASKS` too, but its process is not one of those tasks:
/// only `srun` sets the variables of a step.
fn slurm(lookup: &impl Fn(&str) -> Option<String>) -> Result<Option<LauncherInfo>, DiscoveryError> {
    if lookup("SLURM_STEP_NODELIST").is_none() {
        return Ok(None);
    }
    let rank = number("SLURM_PROCID", lookup)?;
    let world_size = match number("SLURM_STEP_NUM_TASKS", lookup)? {
        None => number("SLURM_NTASKS", lookup)?,
        of_step => of_step,
    };
    if rank.is_none() || world_size.is_none() {
        return Ok(None);
    }
    let name = "SLURM_STEP_TASKS_PER_NODE";
    let node = number("SLURM_NODEID", lookup)?;
    let tasks = |node: NamedValue| tasks_on_node(&lookup(name)?, node.value);
    let local_world_size = node.and_then(tasks).map(|value| NamedValue { name, value });
    let local_rank = number("SLURM_LOCALID", lookup)?;
    Ok(Some(LauncherInfo { launcher: Launcher::Slurm, rank, world_size, local_rank, local_world_size }))
}

fn number(
    name: &'static str,
    lookup: &impl Fn(&str) -> Option<String>,
) -> Result<Option<NamedValue>, DiscoveryError> {
    let Some(text) = lookup(name) else { return Ok(None) };
    match text.trim().parse() {
        Ok(value) => Ok(Some(NamedValue { name, value })),
        Err(_) => Err(DiscoveryError::NotANumber { name, value: text }),
    }
}
