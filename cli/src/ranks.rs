//! The ranks of a command that does not train: threads of this process, or processes of a job; and the flag `--backend`.

use super::DeviceArg;
use crate::failure::{Failure, OrFail};
use crate::output::LOG;
use candle_core::Device;
use clap::ValueEnum;
use ulysses::comm::{LaunchOptions, ProcessFlags, ProcessInfo, RankContext, Session};
use ulysses::config::Backend;
use ulysses::trainer::job::{
    DevicePlacement, DeviceRequest, check_backend, check_build, check_processes, check_threads, join,
    launched_backend,
};

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

/// A process that has joined its job, if it has one.
pub(super) struct Joined<'a> {
    process: Option<&'a mut Box<dyn Session>>,
    backend: Option<Backend>,
}

impl BackendArgs {
    /// Joins the other processes, if ranks are processes.
    pub(super) fn join<'a>(&self, process: &'a mut Option<Box<dyn Session>>) -> Result<Joined<'a>, Failure> {
        self.join_with(None, process)
    }

    /// As [`join`](Self::join), with the backend of a config file, which the flag replaces.
    pub(super) fn join_with<'a>(
        &self,
        of_file: Option<Backend>,
        process: &'a mut Option<Box<dyn Session>>,
    ) -> Result<Joined<'a>, Failure> {
        let by_flag = self.backend.map(Backend::from).or(of_file);
        if by_flag == Some(Backend::Thread) {
            // Variables that contradict each other do not matter to threads.
            if let Ok(info) = ProcessInfo::from_env() {
                check_threads(&info, "--backend thread", LOG)?;
            }
            return Ok(Joined { process: None, backend: by_flag });
        }
        let info = ProcessInfo::from_env().or_usage()?;
        match by_flag {
            Some(backend) => check_backend(backend, true)?,
            None => check_build(&info)?,
        }
        let backend = by_flag.or(launched_backend(&info));
        if let Some(backend) = backend {
            *process = join(&info, backend, &LaunchOptions::default(), LOG)?;
        }
        Ok(Joined { process: process.as_mut(), backend })
    }
}

impl<'a> Joined<'a> {
    /// Returns a process whose ranks are threads, with the default backend.
    pub(super) fn threads() -> Self {
        Self { process: None, backend: None }
    }

    /// Returns whether each rank is a process.
    pub(super) fn are_processes(&self) -> bool {
        self.process.is_some()
    }

    /// Returns the requested number of ranks, else the number of processes, else `default`.
    pub(super) fn count(&self, requested: Option<usize>, default: usize) -> usize {
        requested.unwrap_or(self.process.as_ref().map_or(default, |process| process.world_size()))
    }

    /// Chooses the device and the backend of `world_size` ranks.
    pub(super) fn place(self, device: DeviceArg, world_size: usize) -> Result<Ranks<'a>, Failure> {
        let Self { process, backend } = self;
        let threads = process.is_none().then_some(world_size);
        let request = DeviceRequest { device: device.kind(), backend, threads };
        let ranks = Ranks { placement: DevicePlacement::new(request, LOG.line)?, process };
        ranks.check_count(world_size)?;
        Ok(ranks)
    }
}

/// The ranks of a command that does not train.
pub(super) struct Ranks<'a> {
    process: Option<&'a mut Box<dyn Session>>,
    placement: DevicePlacement,
}

impl Ranks<'_> {
    /// Returns ranks that are threads.
    pub(super) fn threads(placement: DevicePlacement) -> Self {
        Self { process: None, placement }
    }

    pub(super) fn placement(&self) -> &DevicePlacement {
        &self.placement
    }

    /// Returns whether this process compares and reports results.
    pub(super) fn is_first(&self) -> bool {
        self.process.as_ref().is_none_or(|process| process.rank() == 0)
    }

    /// Returns how many of `world_size` ranks run on this machine.
    pub(super) fn local(&self, world_size: usize) -> usize {
        self.process.as_ref().map_or(world_size, |process| process.local_size())
    }

    fn check_count(&self, ranks: usize) -> Result<(), Failure> {
        let Some(process) = &self.process else { return Ok(()) };
        Ok(check_processes(&***process, ranks, &format!("{ranks} rank(s) requested"), "")?)
    }

    /// Runs `run` on all ranks. Returns the result of this process's rank, or of rank 0 if ranks are threads.
    pub(super) fn run<T: Send>(
        &mut self,
        world_size: usize,
        options: &LaunchOptions,
        run: impl Fn(&RankContext, Device) -> anyhow::Result<T> + Sync,
    ) -> Result<T, Failure> {
        self.check_count(world_size)?;
        match &mut self.process {
            Some(process) => process.run(options, run).or_run(),
            None => Ok(self.placement.launch(world_size, options, run).or_run()?.swap_remove(0)),
        }
    }
}
