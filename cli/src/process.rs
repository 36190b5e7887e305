//! This process as one rank of a job of several processes.

use crate::failure::{Failure, OrFail};
use crate::output::mute;
use anyhow::{Context, anyhow};
use candle_core::Device;
use serde::{Serialize, de::DeserializeOwned};
#[cfg(feature = "mpi")]
use ulysses::comm::mpi;
#[cfg(feature = "nccl")]
use ulysses::comm::nccl;
use ulysses::comm::{
    LaunchError, LaunchOptions, Launcher, ProcessFlags, ProcessGroup, ProcessGroupExt, ProcessInfo,
    RankContext,
};
use ulysses::config::Backend;

/// Flags for jobs without a launcher.
#[derive(clap::Args, Clone, Copy, Default)]
pub(super) struct ProcessArgs {
    /// Global rank of this process [default: set by the launcher].
    #[arg(long, requires = "world_size")]
    rank: Option<usize>,
    /// Number of processes in the job [default: set by the launcher].
    #[arg(long)]
    world_size: Option<usize>,
    /// Index of this process on its node: its GPU, unless it sees a single one [default: set by the launcher].
    #[arg(long)]
    local_rank: Option<usize>,
}

impl ProcessArgs {
    pub(super) fn flags(self) -> ProcessFlags {
        ProcessFlags { rank: self.rank, world_size: self.world_size, local_rank: self.local_rank }
    }
}

/// Determines rank and world size of this process from flags and the launcher's environment.
pub(super) fn discover(args: ProcessArgs) -> Result<ProcessInfo, Failure> {
    ProcessInfo::discover(&args.flags(), |name| std::env::var(name).ok()).or_usage()
}

/// Returns the backend that the launcher implies; `None` for a single process.
pub(super) fn launched_backend(info: &ProcessInfo) -> Option<Backend> {
    let by_launcher = if info.launcher.uses_mpi() { Backend::Mpi } else { Backend::Nccl };
    (info.world_size > 1).then_some(by_launcher)
}

/// Checks that this build supports the launcher's backend.
///
/// # Errors
/// A build without it, where each process would train by itself.
pub(super) fn check_build(info: &ProcessInfo) -> Result<(), Failure> {
    let (feature, is_there) = match launched_backend(info) {
        Some(Backend::Mpi) => ("mpi", cfg!(feature = "mpi")),
        Some(_) => ("nccl", cfg!(feature = "nccl")),
        None => return Ok(()),
    };
    if is_there {
        return Ok(());
    }
    let ProcessInfo { launcher, world_size, .. } = info;
    Err(Failure::Usage(anyhow!(
        "{launcher} started {world_size} processes, but this build lacks the feature `{feature}` that connects them: \
         build with --features {feature}, or run one process, whose ranks are threads"
    )))
}

/// Checks that no launcher started several processes, each of which would run all ranks as threads. `stated` is the flag or
/// key of the backend.
pub(super) fn check_threads(info: &ProcessInfo, stated: &str) -> Result<(), Failure> {
    let ProcessInfo { launcher, world_size, rank, .. } = info;
    let Some(backend) = launched_backend(info) else { return Ok(()) };
    mute(*rank > 0);
    let name = if backend == Backend::Mpi { "mpi" } else { "nccl" };
    Err(Failure::Usage(anyhow!(
        "{stated}: {launcher} started {world_size} processes, and each would run all ranks by itself: use the backend \
         {name}, the default here, or run `ulysses` without this launcher and its variables"
    )))
}

/// A process that has joined a job. Uninhabited in builds without such a backend.
pub(super) enum Process {
    #[cfg(feature = "mpi")]
    Mpi(mpi::Session),
    #[cfg(feature = "nccl")]
    Nccl(nccl::Session),
}

impl Process {
    /// Joins the other processes if `backend` connects processes. NCCL waits for at most the timeout of `options`.
    /// Collective.
    #[cfg_attr(not(feature = "nccl"), allow(unused_variables, reason = "MPI has its own timeout"))]
    pub(super) fn join(
        info: &ProcessInfo,
        backend: Backend,
        options: &LaunchOptions,
    ) -> Result<Option<Process>, Failure> {
        let process: Option<Process> = match backend {
            #[cfg(feature = "mpi")]
            Backend::Mpi => {
                check_srun(info)?;
                Some(Process::Mpi(mpi::Session::start().or_run()?))
            }
            #[cfg(feature = "nccl")]
            Backend::Nccl if info.launcher != Launcher::None => {
                Some(Process::Nccl(nccl::Session::start(info, options).or_run()?))
            }
            _ => None,
        };
        if let Some(process) = &process {
            process.check_size(info)?;
            mute(process.rank() > 0);
        }
        Ok(process)
    }

    /// Checks that the launcher and the library agree on rank and world size.
    fn check_size(&self, info: &ProcessInfo) -> Result<(), Failure> {
        let ProcessInfo { launcher, world_size, rank, .. } = info;
        let found = (self.rank(), self.world_size());
        if *launcher == Launcher::None || found == (*rank, *world_size) {
            return Ok(());
        }
        Err(Failure::Run(anyhow!(
            "{launcher} reports rank {rank} of {world_size}, but the communication library reports rank {} of {}: is \
             `ulysses` linked against a different MPI than the launcher's?",
            found.0,
            found.1
        )))
    }
}

#[cfg_attr(
    not(any(feature = "mpi", feature = "nccl")),
    allow(unused_variables, clippy::needless_pass_by_ref_mut, reason = "there is no process")
)]
impl Process {
    pub(super) fn rank(&self) -> usize {
        match *self {
            #[cfg(feature = "mpi")]
            Self::Mpi(ref session) => session.rank(),
            #[cfg(feature = "nccl")]
            Self::Nccl(ref session) => session.rank(),
        }
    }

    pub(super) fn world_size(&self) -> usize {
        match *self {
            #[cfg(feature = "mpi")]
            Self::Mpi(ref session) => session.world_size(),
            #[cfg(feature = "nccl")]
            Self::Nccl(ref session) => session.world_size(),
        }
    }

    /// Returns the number of processes on this machine.
    pub(super) fn local_size(&self) -> usize {
        match *self {
            #[cfg(feature = "mpi")]
            Self::Mpi(ref session) => session.local_size(),
            #[cfg(feature = "nccl")]
            Self::Nccl(ref session) => session.local_size(),
        }
    }

    /// Returns the backend that connects the processes.
    pub(super) fn backend(&self) -> Backend {
        match *self {
            #[cfg(feature = "mpi")]
            Self::Mpi(_) => Backend::Mpi,
            #[cfg(feature = "nccl")]
            Self::Nccl(_) => Backend::Nccl,
        }
    }

    /// Runs this process's rank, with the device of its tensors. Collective.
    pub(super) fn run<T: Send>(
        &mut self,
        options: &LaunchOptions,
        run: impl Fn(&RankContext, Device) -> anyhow::Result<T> + Sync,
    ) -> Result<T, LaunchError> {
        match *self {
            #[cfg(feature = "mpi")]
            Self::Mpi(ref mut session) => session.run(options, |rank| run(&rank, Device::Cpu)),
            #[cfg(feature = "nccl")]
            Self::Nccl(ref mut session) => session.run(options, |rank| run(&rank, rank.group.value_device())),
        }
    }

    /// Gathers a value from every process, in rank order. Collective.
    pub(super) fn all_gather<T: Serialize + DeserializeOwned>(&mut self, own: &T) -> Result<Vec<T>, Failure> {
        let own = serde_json::to_vec(own).or_run()?;
        match *self {
            #[cfg(feature = "mpi")]
            Self::Mpi(ref mut session) => {
                let all = session.run(&LaunchOptions::default(), |rank| rank.group.all_gather_varied(&own));
                parse(&all.or_run()?).or_run()
            }
            #[cfg(feature = "nccl")]
            Self::Nccl(ref session) => parse(&session.group().all_gather_varied(&own).or_run()?).or_run(),
        }
    }
}

/// Checks that `srun` ran with an MPI plugin. Without one, Open MPI aborts at its start with advice on how to rebuild it.
#[cfg(feature = "mpi")]
fn check_srun(info: &ProcessInfo) -> Result<(), Failure> {
    let ProcessInfo { launcher, world_size, rank, .. } = info;
    // PMI_RANK, PMIX_RANK and the like.
    let is_set_by_plugin =
        |name: std::ffi::OsString| name.to_str().is_some_and(|name| name.starts_with("PMI"));
    let has_plugin = || std::env::vars_os().any(|(name, _)| is_set_by_plugin(name));
    if *launcher != Launcher::Slurm || *world_size == 1 || has_plugin() {
        return Ok(());
    }
    mute(*rank > 0);
    Err(Failure::Usage(anyhow!(
        "srun started {world_size} processes without an MPI plugin: use `srun --mpi=pmix` (`srun --mpi=list` shows the \
         available plugins)"
    )))
}

/// Gathers a value from every rank of a group, in rank order. Collective.
pub(super) fn all_gather<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    own: &T,
) -> anyhow::Result<Vec<T>> {
    parse(&group.all_gather_varied(&serde_json::to_vec(own)?)?)
}

fn parse<T: DeserializeOwned>(all: &[Vec<u8>]) -> anyhow::Result<Vec<T>> {
    all.iter()
        .map(|value| serde_json::from_slice(value).context("cannot parse the value of a rank"))
        .collect()
}
