//! The flag `--backend` of what is no training: ranks that are threads, or processes.

use super::process::{self, Process, WorldArgs};
use super::{Failure, OrFail};
use anyhow::anyhow;
use clap::ValueEnum;
use ulysses::comm::{LaunchOptions, RankContext, launch};
use ulysses::config::Backend;
use ulysses::device::DeviceKind;

#[derive(clap::Args)]
pub(super) struct RanksArgs {
    /// What the ranks are.
    #[arg(long, default_value = "thread")]
    backend: RanksArg,
}

#[derive(Clone, Copy, ValueEnum)]
enum RanksArg {
    /// Threads of this process.
    Thread,
    /// Processes that `mpirun` has started (feature `mpi`).
    Mpi,
}

/// `--device cuda` beside `--backend mpi`.
pub(super) fn mpi_takes_no_gpu() -> Failure {
    Failure::Usage(anyhow!(
        "--device and --backend mpi: the MPI backend carries tensors of the CPU; between GPUs NCCL does"
    ))
}

/// Where ranks are run.
pub(super) struct Ranks(Option<Process>);

impl RanksArgs {
    /// Meets the other processes, if ranks are processes.
    pub(super) fn start(&self) -> Result<Ranks, Failure> {
        match self.backend {
            RanksArg::Thread => Ok(Ranks(None)),
            RanksArg::Mpi if cfg!(feature = "mpi") => Ok(Ranks(Process::join(
                &process::discover(WorldArgs::default())?,
                Backend::Mpi,
                &LaunchOptions::default(),
            )?)),
            RanksArg::Mpi => Err(Failure::Usage(anyhow!(
                "--backend mpi: this build lacks the feature `mpi`; `thread` is valid"
            ))),
        }
    }

    /// Refuses a device whose tensors the backend does not carry.
    pub(super) fn check_device(&self, device: DeviceKind) -> Result<(), Failure> {
        match (self.backend, device) {
            (RanksArg::Mpi, DeviceKind::Cuda) => Err(mpi_takes_no_gpu()),
            _ => Ok(()),
        }
    }

    /// For reports.
    pub(super) fn name(&self) -> &'static str {
        match self.backend {
            RanksArg::Thread => "thread",
            RanksArg::Mpi => "mpi",
        }
    }
}

impl Ranks {
    /// Ranks that are threads.
    pub(super) fn threads() -> Self {
        Self(None)
    }

    /// Whether this process is the one that compares and tells.
    pub(super) fn is_first(&self) -> bool {
        self.0.as_ref().is_none_or(|process| process.rank() == 0)
    }

    /// How many of `world_size` ranks share this machine, and its cores.
    pub(super) fn local(&self, world_size: usize) -> usize {
        self.0.as_ref().map_or(world_size, Process::local_size)
    }

    /// Number of ranks: as many as were asked for or, of processes, as there are.
    pub(super) fn count(&self, asked: Option<usize>, usual: usize) -> Result<usize, Failure> {
        let Some(process) = &self.0 else { return Ok(asked.unwrap_or(usual)) };
        let ranks = asked.unwrap_or(process.world_size());
        self.check_count(ranks)?;
        Ok(ranks)
    }

    fn check_count(&self, ranks: usize) -> Result<(), Failure> {
        match &self.0 {
            Some(process) if process.world_size() != ranks => Err(Failure::Usage(anyhow!(
                "{ranks} rank(s) were asked for, but MPI has started {} process(es): start `mpirun -np {ranks}`",
                process.world_size()
            ))),
            _ => Ok(()),
        }
    }

    /// Runs `run` on all ranks and gives what the first one comes to or, of processes, what this one does.
    pub(super) fn run<T: Send>(
        &mut self,
        world_size: usize,
        options: &LaunchOptions,
        run: impl Fn(&RankContext) -> anyhow::Result<T> + Sync,
    ) -> Result<T, Failure> {
        self.check_count(world_size)?;
        match &mut self.0 {
            Some(process) => process.run(options, run).or_run(),
            None => Ok(launch(world_size, options, |rank| run(&rank)).or_run()?.swap_remove(0)),
        }
    }
}
