//! The ranks of a job: threads of this process, or processes of which this is one.

use super::devices::{DevicePlacement, DeviceRequest};
use super::join::{
    backend_of, check_backend, check_build, check_processes, check_threads, join, launched_backend,
};
use super::options::{JobError, JobLog, JobOptions, OrJobError};
use crate::checkpoint::CheckpointError;
use crate::comm::{
    CommError, LaunchError, LaunchOptions, ProcessFlags, ProcessInfo, RankContext, Session,
    all_gather_object, host_name, stated_hosts,
};
use crate::config::{Backend, Config, RawConfig};
use crate::kernels::device::DeviceKind;
use crate::mesh::{Cluster, RankHosts};
use candle_core::Device;
use serde::{Serialize, de::DeserializeOwned};
use std::error::Error;
use std::path::Path;

/// The ranks of a job. They are threads of this process until it joins other processes, and on the CPU until they are placed.
#[derive(Default)]
pub struct JobRanks {
    /// This process's connection to the others, if it has joined any. It ends when it is dropped.
    pub(super) session: Option<Box<dyn Session>>,
    /// The hosts of all ranks, if they are processes.
    rank_hosts: Option<RankHosts>,
    /// The backend of a flag, a config or the launcher.
    backend: Option<Backend>,
    placement: DevicePlacement,
    pub(super) log: JobLog,
}

impl JobRanks {
    /// Returns ranks that are threads until this process joins others. `log` receives the lines of their commands.
    pub fn new(log: JobLog) -> Self {
        Self { log, ..Self::default() }
    }

    /// Returns ranks that are threads, on devices that are chosen already.
    pub fn threads(placement: DevicePlacement) -> Self {
        Self { placement, ..Self::default() }
    }

    /// Joins the processes of the launcher's job, if ranks are processes, for a program without a config file or whose file
    /// is read before. `stated`: the backend of the flag or the file, else the launcher's. Collective.
    ///
    /// # Errors
    /// A launcher that contradicts the backend, a build without it, or processes that do not find each other.
    pub fn join_launched(&mut self, stated: Option<Backend>) -> Result<(), JobError> {
        self.backend = stated;
        let info = self.discover(&ProcessFlags::default(), stated)?;
        let Some(info) = info.filter(|_| stated != Some(Backend::Thread)) else { return Ok(()) };
        match stated {
            Some(backend) => check_backend(backend, true)?,
            None => check_build(&info)?,
        }
        self.backend = stated.or(launched_backend(&info));
        if let Some(backend) = self.backend {
            self.session = join(&info, backend, &LaunchOptions::default(), self.log)?;
        }
        Ok(())
    }

    /// Chooses the device and the backend of `world_size` ranks.
    ///
    /// # Errors
    /// Another number of processes, or a device or backend that the build or the machine lacks.
    pub fn place(&mut self, device: Option<DeviceKind>, world_size: usize) -> Result<(), JobError> {
        let threads = self.session.is_none().then_some(world_size);
        let request = DeviceRequest { device, backend: self.backend, threads };
        self.placement = DevicePlacement::new(request, self.log())?;
        self.check_requested(world_size)
    }

    /// Returns the devices and the backend.
    pub fn placement(&self) -> &DevicePlacement {
        &self.placement
    }

    fn check_requested(&self, ranks: usize) -> Result<(), JobError> {
        let Some(session) = &self.session else { return Ok(()) };
        check_processes(&**session, ranks, &format!("{ranks} rank(s) requested"), "")
    }

    /// Runs `run` on all ranks, with the device of their tensors. Returns the result of this process's rank, or of rank 0 if
    /// ranks are threads.
    ///
    /// # Errors
    /// Another number of processes, or the failure of a rank.
    pub fn run<T: Send, E: Into<Box<dyn Error + Send + Sync>>>(
        &mut self,
        world_size: usize,
        options: &LaunchOptions,
        run: impl Fn(&RankContext, Device) -> Result<T, E> + Sync,
    ) -> Result<T, JobError> {
        self.check_requested(world_size)?;
        match &mut self.session {
            Some(session) => session.run(options, run).or_run(),
            None => Ok(self.placement.launch(world_size, options, run).or_run()?.swap_remove(0)),
        }
    }

    /// Returns the number of processes, if ranks are processes.
    pub fn num_processes(&self) -> Option<usize> {
        self.session.as_ref().map(|session| session.world_size())
    }

    /// Returns what receives the lines of this process: nothing, if another process reports.
    pub(super) fn log(&self) -> fn(&str) {
        if self.is_first() { self.log.line } else { |_| () }
    }

    /// Joins the launcher's job, if any, resolves the config, so that other processes learn of an invalid config, and then
    /// places its ranks. The placement's backend is the config's from then on.
    pub(super) fn join_and_resolve(&mut self, file: &Path, options: &JobOptions) -> Result<Config, JobError> {
        let JobOptions { device, backend: by_flag, log, .. } = *options;
        self.log = log;
        let info = self.discover(&options.process, by_flag)?;
        let launched = info.as_ref().and_then(launched_backend);
        // Errors in the file are reported once, after all have joined. Until then only its timeout is used.
        let raw = RawConfig::from_file_with(file, &options.settings);
        let timeout = raw.as_ref().map_or(LaunchOptions::default().timeout, RawConfig::comm_timeout);
        let launch = LaunchOptions { timeout, ..LaunchOptions::default() };
        if let (Some(info), Some(backend)) = (&info, by_flag.or(launched)) {
            self.join(info, backend, &launch)?;
        }
        let raw = raw.or_usage()?;
        let stated = by_flag.or(raw.backend());
        match (stated, &info) {
            (None, Some(info)) => check_build(info)?,
            (Some(Backend::Thread), Some(info)) => {
                check_threads(info, "`ulysses.backend` is \"thread\"", log)?
            }
            _ => {}
        }
        let backend = stated.or(launched);
        check_backend(backend.unwrap_or_default(), by_flag.is_some())?;
        if let Some(info) = &info {
            self.join(info, backend.unwrap_or_default(), &launch)?;
        }
        if self.session.is_none() {
            self.rank_hosts = stated_hosts(None, variable).or_usage()?.map(|hosts| RankHosts::new(&hosts));
        }
        let mut config = options.resolve(file, &raw, self.cluster(), backend)?;
        self.check_size(&config)?;
        if self.session.is_none() {
            stated_hosts(Some(config.world_size()), variable).or_usage()?;
        }
        self.backend = backend;
        self.place(device, config.world_size())?;
        config.ulysses.backend = self.placement.backend();
        Ok(config)
    }

    /// Finds the process's place in a launcher's job, which must not run all ranks as threads in each process.
    fn discover(
        &self,
        flags: &ProcessFlags,
        by_flag: Option<Backend>,
    ) -> Result<Option<ProcessInfo>, JobError> {
        let discovered = ProcessInfo::discover(flags, variable).or_usage();
        if by_flag != Some(Backend::Thread) {
            return discovered.map(Some);
        }
        // Variables that contradict each other do not matter to threads.
        let info = discovered.ok();
        info.iter().try_for_each(|info| check_threads(info, "--backend thread", self.log))?;
        Ok(info)
    }

    fn join(
        &mut self,
        info: &ProcessInfo,
        backend: Backend,
        options: &LaunchOptions,
    ) -> Result<(), JobError> {
        if self.session.as_ref().is_none_or(|session| backend_of(&**session) != backend) {
            (self.log.mute)(false);
            // The old session ends before the next one starts.
            self.session = None;
            self.session = join(info, backend, options, self.log)?;
            self.gather_hosts()?;
        }
        Ok(())
    }

    /// Gathers the host of every process. Collective.
    fn gather_hosts(&mut self) -> Result<(), JobError> {
        let Some(session) = self.session.as_mut() else { return Ok(()) };
        let stated = stated_hosts(Some(session.world_size()), variable);
        let of_variable = |hosts: &Vec<String>| hosts.get(session.rank()).cloned();
        let own = stated.as_ref().ok().and_then(|hosts| hosts.as_ref().and_then(of_variable));
        let hosts = session.all_gather_object(&own.or_else(host_name).unwrap_or_default()).or_run()?;
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

    fn check_size(&self, config: &Config) -> Result<(), JobError> {
        let Some(session) = &self.session else { return Ok(()) };
        let ranks = config.world_size();
        let job = format!("the mesh {} has {ranks} ranks", config.mesh.shape());
        check_processes(&**session, ranks, &job, ", or choose another mesh (--mesh)")
    }

    /// Returns how many of `world_size` ranks run on this machine.
    pub fn local_ranks(&self, world_size: usize) -> usize {
        self.session.as_ref().map_or(world_size, |session| session.local_size())
    }

    /// Returns how many of `world_size` ranks are threads of this process.
    pub(super) fn ranks_in_process(&self, world_size: usize) -> usize {
        if self.session.is_some() { 1 } else { world_size }
    }

    /// Returns whether this process owns the output directory.
    pub fn is_first(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.rank() == 0)
    }

    /// Returns `own` if all processes succeeded. Otherwise every process fails, and the first failed one reports.
    /// Collective.
    ///
    /// # Errors
    /// The failure of this process or of another.
    pub(super) fn agree<T>(&mut self, own: Result<T, JobError>) -> Result<T, JobError> {
        let Some(session) = self.session.as_mut() else { return own };
        let failed: Vec<Option<bool>> =
            session.all_gather_object(&own.as_ref().err().map(JobError::is_usage)).or_run()?;
        let Some(rank) = failed.iter().position(Option::is_some) else { return own };
        (self.log.mute)(rank != session.rank());
        own.and_then(|_| {
            let elsewhere = format!("rank {rank} cannot start");
            Err(match failed[rank] {
                Some(true) => JobError::usage(elsewhere),
                _ => JobError::run(elsewhere),
            })
        })
    }

    /// Returns whether `own` is true in all processes. Collective.
    ///
    /// # Errors
    /// When the processes cannot communicate.
    pub(super) fn all(&mut self, own: bool) -> Result<bool, JobError> {
        let Some(session) = self.session.as_mut() else { return Ok(own) };
        Ok(session.all_gather_object(&own).or_run()?.into_iter().all(|of_process| of_process))
    }

    /// Returns the value of rank 0. Collective.
    ///
    /// # Errors
    /// When the processes cannot communicate.
    pub(super) fn value_of_first<T: Serialize + DeserializeOwned>(&mut self, own: T) -> Result<T, JobError> {
        let Some(session) = self.session.as_mut() else { return Ok(own) };
        session.all_gather_object(&own).or_run()?.into_iter().next().ok_or("a job has a process").or_run()
    }

    /// Runs `run` on all ranks, with the device of their tensors, and returns the results of all of them in every process.
    pub(super) fn launch<T: Serialize + DeserializeOwned + Send, E: Into<Box<dyn Error + Send + Sync>>>(
        &mut self,
        world_size: usize,
        options: &LaunchOptions,
        run: impl Fn(&RankContext, Device) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, JobError> {
        let Some(session) = self.session.as_mut() else {
            return self.placement.launch(world_size, options, run).map_err(failure);
        };
        let own = session.rank();
        let outcomes = session.run(options, |rank, device| {
            let outcome = run(rank, device).map_err(Into::into)?;
            all_gather_object(&*rank.group, &outcome)
        });
        outcomes.map_err(|error| {
            (self.log.mute)(reporting_rank(&error, own) != own);
            failure(error)
        })
    }
}

/// Returns a variable of the environment.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Classifies an error: a checkpoint that does not fit the config is a usage error.
fn failure(error: LaunchError) -> JobError {
    let is_mismatch = |cause: &&(dyn Error + 'static)| {
        matches!(cause.downcast_ref(), Some(CheckpointError::Mismatch { .. }))
    };
    // All ranks report the same cause; the context adds nothing.
    let mismatch = causes(&error).find(is_mismatch).map(ToString::to_string);
    match mismatch {
        Some(mismatch) => JobError::usage(mismatch),
        None => JobError::run(error),
    }
}

/// Returns an error and its causes.
pub(super) fn causes<'a>(
    error: &'a (dyn Error + 'static),
) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |cause| (*cause).source())
}

/// Returns the rank that reports a failure to the user: the failed one; for missing ranks, the first of the others; for
/// calls that differ, rank 0; else this rank.
fn reporting_rank(error: &LaunchError, own: usize) -> usize {
    let LaunchError::Failed { source, .. } = error else { return own };
    let first_but = |absent: &[usize]| (0..).find(|rank| !absent.contains(rank)).unwrap_or(own);
    match causes(&**source).filter_map(|cause| cause.downcast_ref::<CommError>()).next() {
        Some(CommError::PeerFailed { rank, .. }) => *rank,
        Some(CommError::PeerLeft { rank, .. }) => first_but(&[*rank]),
        Some(CommError::Timeout { missing, .. }) => first_but(missing),
        Some(CommError::Desync { .. }) => 0,
        _ => own,
    }
}
