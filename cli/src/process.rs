//! This process among those of a job, where ranks are processes.

use super::{Failure, OrFail, silence};
use anyhow::{Context, anyhow};
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

/// Which process of a job this is, where no launcher says so.
#[derive(clap::Args, Clone, Copy, Default)]
pub(super) struct WorldArgs {
    /// This process among those of the job; launchers say so by themselves.
    #[arg(long, requires = "world_size")]
    rank: Option<usize>,
    /// Number of processes of the job.
    #[arg(long)]
    world_size: Option<usize>,
    /// The GPU of this process on its node.
    #[arg(long)]
    local_rank: Option<usize>,
}

impl WorldArgs {
    pub(super) fn flags(self) -> ProcessFlags {
        ProcessFlags { rank: self.rank, world_size: self.world_size, local_rank: self.local_rank }
    }
}

/// Who this process is, by its flags and by its launcher.
pub(super) fn discover(args: WorldArgs) -> Result<ProcessInfo, Failure> {
    ProcessInfo::discover(&args.flags(), |name| std::env::var(name).ok()).or_usage()
}

/// What the launcher of several processes would have them use; `None` for a process that is alone.
pub(super) fn launched_backend(info: &ProcessInfo) -> Option<Backend> {
    let by_launcher = if info.launcher.uses_mpi() { Backend::Mpi } else { Backend::Nccl };
    (info.world_size > 1).then_some(by_launcher)
}

/// Whether the build has what the launcher asks for.
///
/// # Errors
/// It does not: every process would train on its own.
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
        "{launcher} has started {world_size} processes, but this build lacks the feature `{feature}`, which would \
         connect them: build with it, or let each process train for itself with --backend thread"
    )))
}

/// A rank of a job. Without the features for such backends there is none.
pub(super) enum Process {
    #[cfg(feature = "mpi")]
    Mpi(mpi::Session),
    #[cfg(feature = "nccl")]
    Nccl(nccl::Session),
}

impl Process {
    /// Meets the other processes, if they are what `backend` connects, and waits for them as long as `options` says
    /// where the library can be told. Collective.
    #[cfg_attr(not(feature = "nccl"), allow(unused_variables, reason = "MPI waits by its own rules"))]
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
            silence(process.rank() > 0);
        }
        Ok(process)
    }

    /// The launcher and the library must have counted the same processes.
    fn check_size(&self, info: &ProcessInfo) -> Result<(), Failure> {
        let ProcessInfo { launcher, world_size, rank, .. } = info;
        let found = (self.rank(), self.world_size());
        if *launcher == Launcher::None || found == (*rank, *world_size) {
            return Ok(());
        }
        Err(Failure::Run(anyhow!(
            "{launcher} says that this is process {rank} of {world_size}, but the library that connects them that it \
             is process {} of {}: is `ulysses` linked with another MPI than that of the launcher?",
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

    /// How many processes share this machine.
    pub(super) fn local_size(&self) -> usize {
        match *self {
            #[cfg(feature = "mpi")]
            Self::Mpi(ref session) => session.local_size(),
            #[cfg(feature = "nccl")]
            Self::Nccl(ref session) => session.local_size(),
        }
    }

    /// What connects the processes.
    pub(super) fn backend(&self) -> Backend {
        match *self {
            #[cfg(feature = "mpi")]
            Self::Mpi(_) => Backend::Mpi,
            #[cfg(feature = "nccl")]
            Self::Nccl(_) => Backend::Nccl,
        }
    }

    /// Runs this process's rank. Collective.
    pub(super) fn run<T: Send>(
        &mut self,
        options: &LaunchOptions,
        run: impl Fn(&RankContext) -> anyhow::Result<T> + Sync,
    ) -> Result<T, LaunchError> {
        match *self {
            #[cfg(feature = "mpi")]
            Self::Mpi(ref mut session) => session.run(options, |rank| run(&rank)),
            #[cfg(feature = "nccl")]
            Self::Nccl(ref mut session) => session.run(options, |rank| run(&rank)),
        }
    }

    /// What every process has, in rank order. Collective.
    pub(super) fn tell_all<T: Serialize + DeserializeOwned>(&mut self, own: &T) -> Result<Vec<T>, Failure> {
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

/// Whether `srun` has told its processes how MPI connects them, which it does by one of its plugins. Where it has
/// not, Open MPI ends them at its start, with advice on how it should have been built.
#[cfg(feature = "mpi")]
fn check_srun(info: &ProcessInfo) -> Result<(), Failure> {
    let ProcessInfo { launcher, world_size, rank, .. } = info;
    // Of PMI_RANK, PMIX_RANK and their like.
    let is_of_plugin = |name: std::ffi::OsString| name.to_str().is_some_and(|name| name.starts_with("PMI"));
    let is_told = || std::env::vars_os().any(|(name, _)| is_of_plugin(name));
    if *launcher != Launcher::Slurm || *world_size == 1 || is_told() {
        return Ok(());
    }
    silence(*rank > 0);
    Err(Failure::Usage(anyhow!(
        "srun has started {world_size} processes, but has not told them how MPI connects them: start \
         `srun --mpi=pmix` (`srun --mpi=list` shows what this SLURM has)"
    )))
}

/// What every rank of a group has, in rank order. Collective.
pub(super) fn exchange<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    own: &T,
) -> anyhow::Result<Vec<T>> {
    parse(&group.all_gather_varied(&serde_json::to_vec(own)?)?)
}

fn parse<T: DeserializeOwned>(all: &[Vec<u8>]) -> anyhow::Result<Vec<T>> {
    all.iter().map(|told| serde_json::from_slice(told).context("what a rank has told")).collect()
}
