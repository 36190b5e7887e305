//! Joining a job of several processes, each of which is a rank.

#[cfg(any(feature = "mpi", feature = "nccl"))]
use super::options::OrJobError;
use super::options::{JobError, JobLog};
use crate::comm::{LaunchOptions, Launcher, ProcessInfo, Session};
use crate::config::Backend;

/// Returns the backend that the launcher implies; `None` for a single process.
pub(super) fn launched_backend(info: &ProcessInfo) -> Option<Backend> {
    let by_launcher = if info.launcher.uses_mpi() { Backend::Mpi } else { Backend::Nccl };
    (info.world_size > 1).then_some(by_launcher)
}

/// Returns the feature of a backend that this build lacks.
fn missing_feature(backend: Backend) -> Option<&'static str> {
    match backend {
        Backend::Mpi if !cfg!(feature = "mpi") => Some("mpi"),
        Backend::Nccl if !cfg!(feature = "nccl") => Some("nccl"),
        _ => None,
    }
}

/// Checks that this build supports the launcher's backend.
///
/// # Errors
/// A build without it, where each process would train by itself.
pub(super) fn check_build(info: &ProcessInfo) -> Result<(), JobError> {
    let Some(feature) = launched_backend(info).and_then(missing_feature) else { return Ok(()) };
    let ProcessInfo { launcher, world_size, .. } = info;
    Err(JobError::usage(format!(
        "{launcher} started {world_size} processes, but this build lacks the feature `{feature}` that connects them: \
         build with --features {feature}, or run one process, whose ranks are threads"
    )))
}

/// Checks that no launcher started several processes, each of which would run all ranks as threads. `stated` is the flag or
/// key of the backend.
///
/// # Errors
/// Such a launcher.
pub(super) fn check_threads(info: &ProcessInfo, stated: &str, log: JobLog) -> Result<(), JobError> {
    let ProcessInfo { launcher, world_size, rank, .. } = info;
    let Some(backend) = launched_backend(info) else { return Ok(()) };
    (log.mute)(*rank > 0);
    let name = if backend == Backend::Mpi { "mpi" } else { "nccl" };
    Err(JobError::usage(format!(
        "{stated}: {launcher} started {world_size} processes, and each would run all ranks by itself: use the backend \
         {name}, the default here, or run `ulysses` without this launcher and its variables"
    )))
}

/// Checks that this build has a backend. `is_flag`: a flag names it, else the config.
///
/// # Errors
/// A build without it.
pub(super) fn check_backend(backend: Backend, is_flag: bool) -> Result<(), JobError> {
    let Some(name) = missing_feature(backend) else { return Ok(()) };
    let place =
        if is_flag { format!("--backend {name}") } else { format!("`ulysses.backend` is \"{name}\"") };
    Err(JobError::usage(format!(
        "{place}: this build lacks the feature `{name}`; use `thread`, or build with --features {name}"
    )))
}

/// Joins the other processes if `backend` connects processes. NCCL waits for at most the timeout of `options`. Collective.
///
/// # Errors
/// When the processes do not find each other, or the launcher and the library disagree on rank and world size.
#[cfg_attr(not(feature = "nccl"), allow(unused_variables, reason = "MPI has its own timeout"))]
pub(super) fn join(
    info: &ProcessInfo,
    backend: Backend,
    options: &LaunchOptions,
    log: JobLog,
) -> Result<Option<Box<dyn Session>>, JobError> {
    let session: Option<Box<dyn Session>> = match backend {
        #[cfg(feature = "mpi")]
        Backend::Mpi => {
            check_srun(info, log)?;
            Some(Box::new(crate::comm::mpi::Session::start().or_run()?))
        }
        #[cfg(feature = "nccl")]
        Backend::Nccl if info.launcher != Launcher::None => {
            Some(Box::new(crate::comm::nccl::Session::start(info, options).or_run()?))
        }
        _ => None,
    };
    let Some(session) = session else { return Ok(None) };
    let ProcessInfo { launcher, world_size, rank, .. } = info;
    let found = (session.rank(), session.world_size());
    if *launcher != Launcher::None && found != (*rank, *world_size) {
        return Err(JobError::run(format!(
            "{launcher} reports rank {rank} of {world_size}, but the communication library reports rank {} of {}: is \
             `ulysses` linked against a different MPI than the launcher's?",
            found.0, found.1
        )));
    }
    (log.mute)(session.rank() > 0);
    Ok(Some(session))
}

/// Returns the backend that connects the processes of a session.
pub(super) fn backend_of(session: &dyn Session) -> Backend {
    if session.uses_mpi() { Backend::Mpi } else { Backend::Nccl }
}

/// Checks that a session has as many processes as the job has ranks. `job` is the start of the message, such as "4
/// rank(s) requested"; `remedy` its end.
///
/// # Errors
/// Another number of processes.
pub(super) fn check_processes(
    session: &dyn Session,
    ranks: usize,
    job: &str,
    remedy: &str,
) -> Result<(), JobError> {
    let processes = session.world_size();
    if processes == ranks {
        return Ok(());
    }
    let (started, command) = match session.uses_mpi() {
        true => ("MPI", "mpirun -np"),
        false => ("the launcher", "ulysses launch --nproc"),
    };
    Err(JobError::usage(format!(
        "{job}, but {started} started {processes} process(es): use `{command} {ranks}`{remedy}"
    )))
}

/// Checks that `srun` ran with an MPI plugin. Without one, Open MPI aborts at its start with advice on how to rebuild it.
#[cfg(feature = "mpi")]
fn check_srun(info: &ProcessInfo, log: JobLog) -> Result<(), JobError> {
    let ProcessInfo { launcher, world_size, rank, .. } = info;
    // PMI_RANK, PMIX_RANK and the like.
    let is_set_by_plugin =
        |name: std::ffi::OsString| name.to_str().is_some_and(|name| name.starts_with("PMI"));
    let has_plugin = || std::env::vars_os().any(|(name, _)| is_set_by_plugin(name));
    if *launcher != Launcher::Slurm || *world_size == 1 || has_plugin() {
        return Ok(());
    }
    (log.mute)(*rank > 0);
    Err(JobError::usage(format!(
        "srun started {world_size} processes without an MPI plugin: use `srun --mpi=pmix` (`srun --mpi=list` shows the \
         available plugins)"
    )))
}
