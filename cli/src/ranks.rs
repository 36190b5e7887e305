//! The flag `--backend` of commands that do not train: ranks as threads or as processes.

use super::process::{self, Process, ProcessArgs};
use super::{Failure, OrFail};
use anyhow::anyhow;
use clap::ValueEnum;
use ulysses::comm::{LaunchOptions, RankContext, launch};
use ulysses::config::Backend;
use ulysses::device::DeviceKind;

#[derive(clap::Args)]
pub(super) struct BackendArgs {
    /// Backend that runs the ranks.
    #[arg(long, default_value = "thread")]
    backend: RankBackend,
}

#[derive(Clone, Copy, ValueEnum)]
enum RankBackend {
    /// Ranks are threads of this process.
    Thread,
    /// Ranks are processes that `mpirun` starts; needs the feature `mpi`.
    Mpi,
}

/// The error for `--device cuda` with `--backend mpi`.
pub(super) fn mpi_gpu_error() -> Failure {
    Failure::Usage(anyhow!(
        "--device cuda cannot be used with --backend mpi: the MPI backend supports CPU tensors only; use NCCL for GPUs"
    ))
}

/// Runs ranks as threads or as processes.
pub(super) struct Ranks<'a>(Option<&'a mut Process>);

impl BackendArgs {
    /// Joins the other processes, if ranks are processes.
    pub(super) fn start<'a>(&self, process: &'a mut Option<Process>) -> Result<Ranks<'a>, Failure> {
        match self.backend {
            RankBackend::Thread => Ok(Ranks(None)),
            RankBackend::Mpi if cfg!(feature = "mpi") => {
                let info = process::discover(ProcessArgs::default())?;
                *process = Process::join(&info, Backend::Mpi, &LaunchOptions::default())?;
                Ok(Ranks(process.as_mut()))
            }
            RankBackend::Mpi => Err(Failure::Usage(anyhow!(
                "--backend mpi: this build lacks the feature `mpi`; use `thread`, or build with --features mpi"
            ))),
        }
    }

    /// Rejects a device that the backend does not support.
    pub(super) fn check_device(&self, device: DeviceKind) -> Result<(), Failure> {
        match (self.backend, device) {
            (RankBackend::Mpi, DeviceKind::Cuda) => Err(mpi_gpu_error()),
            _ => Ok(()),
        }
    }

    /// Returns the backend's name for reports.
    pub(super) fn name(&self) -> &'static str {
        match self.backend {
            RankBackend::Thread => "thread",
            RankBackend::Mpi => "mpi",
        }
    }
}

impl Ranks<'_> {
    /// Returns ranks that are threads.
    pub(super) fn threads() -> Self {
        Self(None)
    }

    /// Returns whether this process compares and reports results.
    pub(super) fn is_first(&self) -> bool {
        self.0.as_ref().is_none_or(|process| process.rank() == 0)
    }

    /// Returns how many of `world_size` ranks run on this machine.
    pub(super) fn local(&self, world_size: usize) -> usize {
        self.0.as_ref().map_or(world_size, |process| process.local_size())
    }

    /// Returns the requested number of ranks, else the number of processes, else `default`.
    pub(super) fn count(&self, requested: Option<usize>, default: usize) -> Result<usize, Failure> {
        let Some(process) = &self.0 else { return Ok(requested.unwrap_or(default)) };
        let ranks = requested.unwrap_or(process.world_size());
        self.check_count(ranks)?;
        Ok(ranks)
    }

    fn check_count(&self, ranks: usize) -> Result<(), Failure> {
        match &self.0 {
            Some(process) if process.world_size() != ranks => Err(Failure::Usage(anyhow!(
                "{ranks} rank(s) requested, but MPI started {} process(es): use `mpirun -np {ranks}`",
                process.world_size()
            ))),
            _ => Ok(()),
        }
    }

    /// Runs `run` on all ranks. Returns the result of this process's rank, or of rank 0 if ranks are threads.
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
