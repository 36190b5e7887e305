//! The ranks of a run: threads of this process, or processes of a job.

use super::overrides::resolve;
use crate::DeviceArg;
use crate::failure::{Failure, OrFail};
use crate::output::mute;
use crate::placement::{Placement, Request};
use crate::process::{self, Process, ProcessArgs, all_gather};
use crate::ranks::{check_backend, run_threads};
use anyhow::{Context, anyhow};
use candle_core::Device;
use serde::{Serialize, de::DeserializeOwned};
use ulysses::checkpoint::CheckpointError;
use ulysses::comm::{
    CommError, LaunchError, LaunchOptions, ProcessInfo, RankContext, host_name, stated_hosts,
};
use ulysses::config::{Backend, Config, ConfigError, Overrides, RawConfig};
use ulysses::mesh::{Cluster, RankHosts};

/// This process, and the job that it has joined, if any.
pub(super) struct Host<'a> {
    process: &'a mut Option<Process>,
    /// The hosts of all ranks, if they are processes.
    rank_hosts: Option<RankHosts>,
}

impl<'a> Host<'a> {
    pub(super) fn new(process: &'a mut Option<Process>) -> Self {
        Self { process, rank_hosts: None }
    }

    /// Joins the launcher's job, if any, resolves the config, so that other processes learn of an invalid config, and then
    /// places its ranks. The placement's backend is the config's from then on.
    pub(super) fn join_and_resolve(
        &mut self,
        args: ProcessArgs,
        (device, by_flag): (DeviceArg, Option<Backend>),
        read: impl FnOnce() -> Result<RawConfig, ConfigError>,
        overrides: impl FnOnce(&RawConfig, Option<Cluster>, Option<Backend>) -> Result<Overrides, Failure>,
    ) -> Result<(Config, Placement), Failure> {
        // Variables that contradict each other do not matter to threads.
        let info = match by_flag {
            Some(Backend::Thread) => process::discover(args).ok(),
            _ => Some(process::discover(args)?),
        };
        if let (Some(Backend::Thread), Some(info)) = (by_flag, &info) {
            process::check_threads(info, "--backend thread")?;
        }
        let discovered = info.as_ref().and_then(process::launched_backend);
        // Errors in the file are reported once, after all have joined. Until then only its timeout is used.
        let raw = read();
        let timeout = raw.as_ref().map_or(LaunchOptions::default().timeout, RawConfig::comm_timeout);
        let options = LaunchOptions { timeout, ..LaunchOptions::default() };
        if let (Some(info), Some(backend)) = (&info, by_flag.or(discovered)) {
            self.join(info, backend, &options)?;
        }
        let raw = raw.or_usage()?;
        let stated = by_flag.or(raw.backend());
        match (stated, &info) {
            (None, Some(info)) => process::check_build(info)?,
            (Some(Backend::Thread), Some(info)) => {
                process::check_threads(info, "`ulysses.backend` is \"thread\"")?
            }
            _ => {}
        }
        let backend = stated.or(discovered);
        check_backend(backend.unwrap_or_default(), by_flag.is_some())?;
        if let Some(info) = &info {
            self.join(info, backend.unwrap_or_default(), &options)?;
        }
        if self.process.is_none() {
            self.rank_hosts = stated_hosts(None, variable).or_usage()?.map(|hosts| RankHosts::new(&hosts));
        }
        let overrides = Overrides { backend, ..overrides(&raw, self.cluster(), backend)? };
        let mut config = resolve(&raw, &overrides)?;
        self.check_size(&config)?;
        if self.process.is_none() {
            stated_hosts(Some(config.world_size()), variable).or_usage()?;
        }
        let threads = self.process.is_none().then_some(config.world_size());
        let placement = Placement::of(Request { device, backend, threads })?;
        config.ulysses.backend = placement.backend;
        Ok((config, placement))
    }

    fn join(&mut self, info: &ProcessInfo, backend: Backend, options: &LaunchOptions) -> Result<(), Failure> {
        if self.process.as_ref().is_none_or(|process| process.backend() != backend) {
            mute(false);
            // The old session ends before the next one starts.
            *self.process = None;
            *self.process = Process::join(info, backend, options)?;
            self.gather_hosts()?;
        }
        Ok(())
    }

    /// Gathers the host of every process. Collective.
    fn gather_hosts(&mut self) -> Result<(), Failure> {
        let Some(process) = self.process.as_mut() else { return Ok(()) };
        let stated = stated_hosts(Some(process.world_size()), variable);
        let of_variable = |hosts: &Vec<String>| hosts.get(process.rank()).cloned();
        let own = stated.as_ref().ok().and_then(|hosts| hosts.as_ref().and_then(of_variable));
        let hosts = process.all_gather(&own.unwrap_or_else(host_name))?;
        self.rank_hosts = Some(RankHosts::new(&hosts));
        // Only now, so that the others do not wait for this process.
        stated.map(|_| ()).or_usage()
    }

    /// Returns the hosts of all ranks, if they are known.
    pub(super) fn rank_hosts(&self) -> Option<&RankHosts> {
        self.rank_hosts.as_ref()
    }

    /// Returns the job's cluster; one node if nodes have different numbers of ranks.
    fn cluster(&self) -> Option<Cluster> {
        let hosts = self.rank_hosts.as_ref()?;
        let one_node = Cluster { nodes: 1, ranks_per_node: hosts.world_size() };
        Some(hosts.cluster().unwrap_or(one_node))
    }

    fn check_size(&self, config: &Config) -> Result<(), Failure> {
        let Some(process) = &*self.process else { return Ok(()) };
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
            "the mesh dp {dp_size} × sp {sp_size} has {ranks} ranks, but {library} started {processes} process(es): \
             use `{command} {ranks}`, or choose another --mesh"
        )))
    }

    /// Returns how many of `world_size` ranks run on this machine.
    pub(super) fn local_ranks(&self, world_size: usize) -> usize {
        self.process.as_ref().map_or(world_size, Process::local_size)
    }

    /// Returns how many of `world_size` ranks are threads of this process.
    pub(super) fn ranks_in_process(&self, world_size: usize) -> usize {
        if self.process.is_some() { 1 } else { world_size }
    }

    /// Returns whether this process owns the output directory.
    pub(super) fn is_first(&self) -> bool {
        self.process.as_ref().is_none_or(|process| process.rank() == 0)
    }

    /// Returns `own` if all processes succeeded. Otherwise every process fails, and the first failed one reports. Collective.
    pub(super) fn agree<T>(&mut self, own: Result<T, Failure>) -> Result<T, Failure> {
        let Some(process) = self.process.as_mut() else { return own };
        let exit_code = match &own {
            Ok(_) => None,
            Err(Failure::Usage(_)) => Some(2),
            Err(_) => Some(1),
        };
        let all: Vec<Option<u8>> = process.all_gather(&exit_code)?;
        let Some(failed) = all.iter().position(Option::is_some) else { return own };
        mute(failed != process.rank());
        let elsewhere = || anyhow!("rank {failed} cannot start");
        match (own, all[failed]) {
            (Err(failure), _) => Err(failure),
            (Ok(_), Some(2)) => Err(Failure::Usage(elsewhere())),
            (Ok(_), _) => Err(Failure::Run(elsewhere())),
        }
    }

    /// Returns whether `own` is true in all processes. Collective.
    pub(super) fn all(&mut self, own: bool) -> Result<bool, Failure> {
        let Some(process) = self.process.as_mut() else { return Ok(own) };
        Ok(process.all_gather(&own)?.into_iter().all(|of_process| of_process))
    }

    /// Returns the value of rank 0. Collective.
    pub(super) fn value_of_first<T: Serialize + DeserializeOwned>(&mut self, own: T) -> Result<T, Failure> {
        let Some(process) = self.process.as_mut() else { return Ok(own) };
        process.all_gather(&own)?.into_iter().next().context("a job has a process").or_run()
    }

    /// Runs `train` on all ranks and returns the results of all of them to every process.
    pub(super) fn launch<T: Serialize + DeserializeOwned + Send>(
        &mut self,
        config: &Config,
        placement: &Placement,
        options: &LaunchOptions,
        train: impl Fn(&RankContext, Device) -> anyhow::Result<T> + Sync,
    ) -> Result<Vec<T>, Failure> {
        let Some(process) = self.process.as_mut() else {
            return run_threads(placement, config.world_size(), options, train).map_err(failure);
        };
        let own = process.rank();
        let outcomes = process.run(options, |rank, device| all_gather(&*rank.group, &train(rank, device)?));
        outcomes.map_err(|error| {
            mute(reporting_rank(&error, own) != own);
            failure(error)
        })
    }
}

/// Returns a variable of the environment.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Classifies an error: a checkpoint that does not fit the config is a usage error.
fn failure(error: LaunchError) -> Failure {
    let error = anyhow::Error::from(error);
    let is_mismatch = |cause: &(dyn std::error::Error + 'static)| {
        matches!(cause.downcast_ref(), Some(CheckpointError::Mismatch { .. }))
    };
    match error.chain().find(|cause| is_mismatch(*cause)) {
        // All ranks report the same cause; the context adds nothing.
        Some(mismatch) => Failure::Usage(anyhow!("{mismatch}")),
        None => Failure::Run(error),
    }
}

/// Returns the rank that reports a failure to the user: the failed one; for missing ranks, the first of the others; for
/// calls that differ, rank 0; else this rank.
fn reporting_rank(error: &LaunchError, own: usize) -> usize {
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
