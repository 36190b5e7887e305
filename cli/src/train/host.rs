//! Where a run's ranks are: threads of this process, or processes of a job, of which this is one.

use super::overrides::{lacks_backend, resolve};
use crate::process::{self, Process, WorldArgs, exchange};
use crate::ranks::mpi_takes_no_gpu;
use crate::{Failure, OrFail, mute};
use anyhow::{Context, anyhow};
use candle_core::Device;
use serde::{Serialize, de::DeserializeOwned};
use ulysses::checkpoint::CheckpointError;
use ulysses::comm::{CommError, LaunchError, LaunchOptions, ProcessInfo, RankContext, launch};
use ulysses::config::{Backend, Config, ConfigError, Overrides, RawConfig};
use ulysses::device::DeviceKind;
use ulysses::mesh::Cluster;

/// This process among those of a run.
#[derive(Default)]
pub(super) struct Host {
    process: Option<Process>,
}

impl Host {
    /// Joins the job that a launcher has started this process for, and resolves the config for it: the config of
    /// one process may be at fault, and the others must hear of it.
    pub(super) fn enter(
        &mut self,
        world: WorldArgs,
        by_flag: Option<Backend>,
        read: impl FnOnce() -> Result<RawConfig, ConfigError>,
        overrides: impl FnOnce(&RawConfig, Option<Cluster>, Backend) -> Result<Overrides, Failure>,
    ) -> Result<Config, Failure> {
        // What each process trains for itself is no job.
        let is_alone = by_flag == Some(Backend::Thread);
        let place = if is_alone { None } else { Some(process::discover(world)?) };
        let discovered = place.as_ref().and_then(process::launched_backend);
        // What is wrong with the file is told when all have met, once. Until then it says how long to wait.
        let raw = read();
        let timeout = raw.as_ref().map_or(LaunchOptions::default().timeout, RawConfig::comm_timeout);
        let options = LaunchOptions { timeout, ..LaunchOptions::default() };
        if let (Some(place), Some(backend)) = (&place, by_flag.or(discovered)) {
            self.join(place, backend, &options)?;
        }
        let raw = raw.or_usage()?;
        let stated = by_flag.or(raw.backend());
        if let (None, Some(place)) = (stated, &place) {
            process::check_build(place)?;
        }
        let backend = stated.or(discovered).unwrap_or_default();
        check_build(backend, by_flag.is_some())?;
        if let Some(place) = &place {
            self.join(place, backend, &options)?;
        }
        let overrides = Overrides { backend: Some(backend), ..overrides(&raw, self.cluster(), backend)? };
        let config = resolve(&raw, &overrides)?;
        self.check_size(&config)?;
        Ok(config)
    }

    fn join(
        &mut self,
        place: &ProcessInfo,
        backend: Backend,
        options: &LaunchOptions,
    ) -> Result<(), Failure> {
        if self.process.as_ref().is_none_or(|process| process.backend() != backend) {
            mute(false);
            // Before the next one starts.
            self.process = None;
            self.process = Process::join(place, backend, options)?;
        }
        Ok(())
    }

    /// The processes of the job, as evenly on its nodes as this one's are.
    fn cluster(&self) -> Option<Cluster> {
        let process = self.process.as_ref()?;
        let (ranks, of_node) = (process.world_size(), process.local_size());
        let ranks_per_node = if ranks.is_multiple_of(of_node) { of_node } else { ranks };
        Some(Cluster { nodes: ranks / ranks_per_node, ranks_per_node })
    }

    fn check_size(&self, config: &Config) -> Result<(), Failure> {
        let Some(process) = &self.process else { return Ok(()) };
        let (dp_size, sp_size, ranks) = (config.mesh.dp_size, config.mesh.sp_size, config.world_size());
        let processes = process.world_size();
        if ranks == processes {
            return Ok(());
        }
        let (library, command) = match process.backend() {
            Backend::Mpi => ("MPI", "mpirun -np"),
            _ => ("the launcher", "ulysses launch --nproc"),
        };
        Err(Failure::Usage(anyhow!(
            "the mesh dp {dp_size} × sp {sp_size} has {ranks} ranks, but {library} has started {processes} \
             process(es): start `{command} {ranks}`, or choose another --mesh"
        )))
    }

    /// How many of a world's ranks share this machine.
    pub(super) fn local_ranks(&self, world_size: usize) -> usize {
        self.process.as_ref().map_or(world_size, Process::local_size)
    }

    /// How many of them are threads of this process.
    pub(super) fn ranks_in_process(&self, world_size: usize) -> usize {
        if self.process.is_some() { 1 } else { world_size }
    }

    /// Whether this process owns the output directory.
    pub(super) fn is_first(&self) -> bool {
        self.process.as_ref().is_none_or(|process| process.rank() == 0)
    }

    /// The kind of device that the ranks' tensors are on.
    pub(super) fn device(&self, asked: DeviceKind, backend: Backend) -> Result<DeviceKind, Failure> {
        match backend {
            Backend::Mpi if asked != DeviceKind::Cpu => Err(mpi_takes_no_gpu()),
            Backend::Nccl if self.process.is_none() => {
                DeviceKind::Cuda.open(0).or_usage()?;
                Ok(DeviceKind::Cuda)
            }
            Backend::Nccl => Ok(DeviceKind::Cuda),
            _ => Ok(asked),
        }
    }

    /// What this process has, once all have theirs. Of several that have failed, the first says why.
    pub(super) fn agree<T>(&mut self, own: Result<T, Failure>) -> Result<T, Failure> {
        let Some(process) = &mut self.process else { return own };
        let exit_code = match &own {
            Ok(_) => None,
            Err(Failure::Usage(_)) => Some(2),
            Err(_) => Some(1),
        };
        let all: Vec<Option<u8>> = process.tell_all(&exit_code)?;
        let Some(refusing) = all.iter().position(Option::is_some) else { return own };
        mute(refusing != process.rank());
        let elsewhere = || anyhow!("rank {refusing} cannot start");
        match (own, all[refusing]) {
            (Err(failure), _) => Err(failure),
            (Ok(_), Some(2)) => Err(Failure::Usage(elsewhere())),
            (Ok(_), _) => Err(Failure::Run(elsewhere())),
        }
    }

    /// What the first process has.
    pub(super) fn of_first<T: Serialize + DeserializeOwned>(&mut self, own: T) -> Result<T, Failure> {
        let Some(process) = &mut self.process else { return Ok(own) };
        process.tell_all(&own)?.into_iter().next().context("a job has a process").or_run()
    }

    /// Runs `train` on all ranks; every process gets to know how each of them ended.
    pub(super) fn launch<T: Serialize + DeserializeOwned + Send>(
        &mut self,
        config: &Config,
        device: DeviceKind,
        options: &LaunchOptions,
        train: impl Fn(&RankContext, Device) -> anyhow::Result<T> + Sync,
    ) -> Result<Vec<T>, Failure> {
        let Some(process) = &mut self.process else {
            return launch_threads(config, device, options, train).map_err(failure);
        };
        let (own, backend) = (process.rank(), process.backend());
        let outcomes = process.run(options, |rank| {
            let device = if backend == Backend::Mpi { Device::Cpu } else { rank.group.value_device() };
            exchange(&*rank.group, &train(rank, device)?)
        });
        outcomes.map_err(|error| {
            mute(speaker(&error, own) != own);
            failure(error)
        })
    }
}

/// Runs ranks that are threads of this process.
fn launch_threads<T: Send>(
    config: &Config,
    device: DeviceKind,
    options: &LaunchOptions,
    train: impl Fn(&RankContext, Device) -> anyhow::Result<T> + Sync,
) -> Result<Vec<T>, LaunchError> {
    let world_size = config.world_size();
    match config.ulysses.backend {
        #[cfg(feature = "nccl")]
        Backend::Nccl => {
            let gpus: Vec<usize> = (0..world_size).collect();
            ulysses::comm::nccl::launch(&gpus, options, |rank| train(&rank, rank.group.value_device()))
        }
        _ => launch(world_size, options, |rank| train(&rank, device.open(rank.rank)?)),
    }
}

/// Whose fault it is: a checkpoint that the config does not fit is the caller's.
fn failure(error: LaunchError) -> Failure {
    let error = anyhow::Error::from(error);
    let is_mismatch = |cause: &(dyn std::error::Error + 'static)| {
        matches!(cause.downcast_ref(), Some(CheckpointError::Mismatch { .. }))
    };
    match error.chain().find(|cause| is_mismatch(*cause)) {
        // All ranks say so, and the cause matters more than that they cannot resume.
        Some(mismatch) => Failure::Usage(anyhow!("{mismatch}")),
        None => Failure::Run(error),
    }
}

/// Refuses a backend that this build does not have.
fn check_build(backend: Backend, by_flag: bool) -> Result<(), Failure> {
    match backend {
        Backend::Mpi if !cfg!(feature = "mpi") => Err(lacks_backend("mpi", by_flag)),
        Backend::Nccl if !cfg!(feature = "nccl") => Err(lacks_backend("nccl", by_flag)),
        _ => Ok(()),
    }
}

/// The rank that tells the user of a failure: the one whose own it is, or of many that were told the
/// same the first that can.
fn speaker(error: &LaunchError, own: usize) -> usize {
    let LaunchError::Failed { source, .. } = error else { return own };
    let causes =
        std::iter::successors(Some(&**source as &(dyn std::error::Error + 'static)), |cause| cause.source());
    let first_but = |absent: &[usize]| (0..).find(|rank| !absent.contains(rank)).unwrap_or(own);
    match causes.filter_map(|cause| cause.downcast_ref::<CommError>()).next() {
        Some(CommError::PeerFailed { rank, .. }) => *rank,
        Some(CommError::PeerLeft { rank, .. }) => first_but(&[*rank]),
        Some(CommError::Timeout { missing, .. }) => first_but(missing),
        Some(CommError::Desync { .. }) => 0,
        _ => own,
    }
}
