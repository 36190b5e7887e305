//! The flags of ranks: `--backend`, and those of jobs without a launcher.

use crate::failure::Failure;
use clap::ValueEnum;
use ulysses::comm::ProcessFlags;
use ulysses::config::Backend;
use ulysses::trainer::job::JobRanks;

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum BackendArg {
    /// Ranks are threads of this process.
    Thread,
    /// Ranks are threads or processes with one GPU each; needs the feature `nccl`.
    Nccl,
    /// Ranks are processes that `mpirun` starts; needs the feature `mpi`.
    Mpi,
}

impl From<BackendArg> for Backend {
    fn from(backend: BackendArg) -> Self {
        match backend {
            BackendArg::Thread => Self::Thread,
            BackendArg::Nccl => Self::Nccl,
            BackendArg::Mpi => Self::Mpi,
        }
    }
}

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

/// The flag of commands that do not train.
#[derive(clap::Args)]
pub(super) struct BackendArgs {
    /// Communication backend [default: the launcher's, else nccl for several ranks on several GPUs, else thread].
    #[arg(long)]
    backend: Option<BackendArg>,
}

impl BackendArgs {
    /// Joins the other processes, if ranks are processes. The flag replaces the backend of a config file.
    pub(super) fn join(&self, of_file: Option<Backend>, ranks: &mut JobRanks) -> Result<(), Failure> {
        Ok(ranks.join_launched(self.backend.map(Backend::from).or(of_file))?)
    }
}
