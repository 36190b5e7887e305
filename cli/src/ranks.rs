//! The ranks of a command: threads of this process, or processes of a job; and the flag `--backend`.

use super::DeviceArg;
use super::placement::{Placement, Request};
use super::process::{self, Process, ProcessArgs};
use crate::failure::{Failure, OrFail};
use anyhow::anyhow;
use candle_core::Device;
use clap::ValueEnum;
use ulysses::comm::{LaunchError, LaunchOptions, RankContext, launch};
use ulysses::config::Backend;
#[cfg(feature = "nccl")]
use ulysses::device::DeviceError;

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

/// Rejects a backend that this build lacks.
pub(super) fn check_backend(backend: Backend, is_flag: bool) -> Result<(), Failure> {
    let (name, is_built) = match backend {
        Backend::Mpi => ("mpi", cfg!(feature = "mpi")),
        Backend::Nccl => ("nccl", cfg!(feature = "nccl")),
        _ => return Ok(()),
    };
    if is_built {
        return Ok(());
    }
    let place =
        if is_flag { format!("--backend {name}") } else { format!("`ulysses.backend` is \"{name}\"") };
    Err(Failure::Usage(anyhow!(
        "{place}: this build lacks the feature `{name}`; use `thread`, or build with --features {name}"
    )))
}

/// Runs `run` on ranks that are threads of this process.
pub(super) fn run_threads<T: Send>(
    placement: &Placement,
    world_size: usize,
    options: &LaunchOptions,
    run: impl Fn(&RankContext, Device) -> anyhow::Result<T> + Sync,
) -> Result<Vec<T>, LaunchError> {
    match placement.backend {
        #[cfg(feature = "nccl")]
        Backend::Nccl => {
            let gpus = placement.gpus(world_size);
            ulysses::comm::nccl::launch(&gpus, options, |rank| run(&rank, rank.group.value_device())).map_err(
                |error| match error {
                    LaunchError::Failed { rank, source } if source.is::<DeviceError>() => {
                        LaunchError::Failed { rank, source: placement.explain(source).into() }
                    }
                    other => other,
                },
            )
        }
        _ => launch(world_size, options, |rank| run(&rank, placement.open()?)),
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
    process: Option<&'a mut Process>,
    backend: Option<Backend>,
}

impl BackendArgs {
    /// Joins the other processes, if ranks are processes.
    pub(super) fn join<'a>(&self, process: &'a mut Option<Process>) -> Result<Joined<'a>, Failure> {
        self.join_with(None, process)
    }

    /// As [`join`](Self::join), with the backend of a config file, which the flag replaces.
    pub(super) fn join_with<'a>(
        &self,
        of_file: Option<Backend>,
        process: &'a mut Option<Process>,
    ) -> Result<Joined<'a>, Failure> {
        let by_flag = self.backend.map(Backend::from).or(of_file);
        if by_flag == Some(Backend::Thread) {
            // Variables that contradict each other do not matter to threads.
            if let Ok(info) = process::discover(ProcessArgs::default()) {
                process::check_threads(&info, "--backend thread")?;
            }
            return Ok(Joined { process: None, backend: by_flag });
        }
        let info = process::discover(ProcessArgs::default())?;
        match by_flag {
            Some(backend) => check_backend(backend, true)?,
            None => process::check_build(&info)?,
        }
        let backend = by_flag.or(process::launched_backend(&info));
        if let Some(backend) = backend {
            *process = Process::join(&info, backend, &LaunchOptions::default())?;
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
        let ranks = Ranks { placement: Placement::of(Request { device, backend, threads })?, process };
        ranks.check_count(world_size)?;
        Ok(ranks)
    }
}

/// The ranks of a command that does not train.
pub(super) struct Ranks<'a> {
    process: Option<&'a mut Process>,
    placement: Placement,
}

impl Ranks<'_> {
    /// Returns ranks that are threads.
    pub(super) fn threads(placement: Placement) -> Self {
        Self { process: None, placement }
    }

    pub(super) fn placement(&self) -> &Placement {
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
        let (started, command) = match process.backend() {
            Backend::Mpi => ("MPI", "mpirun -np"),
            _ => ("the launcher", "ulysses launch --nproc"),
        };
        match process.world_size() {
            processes if processes == ranks => Ok(()),
            processes => Err(Failure::Usage(anyhow!(
                "{ranks} rank(s) requested, but {started} started {processes} process(es): use `{command} {ranks}`"
            ))),
        }
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
            None => Ok(run_threads(&self.placement, world_size, options, run).or_run()?.swap_remove(0)),
        }
    }
}
