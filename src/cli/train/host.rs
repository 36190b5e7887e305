//! Where a run's ranks are: threads of this process, or processes of an MPI job, of which this is one.

#[cfg(not(feature = "mpi"))]
use super::prepare::lacks_backend;
use super::{RankOutcome, Run};
use crate::cli::Failure;
use ulysses::config::{Backend, Config};
#[cfg(feature = "mpi")]
use {
    super::failure,
    crate::cli::{OrFail, silence},
    anyhow::{Context, anyhow},
    candle_core::Device,
    serde::{Serialize, de::DeserializeOwned},
    ulysses::comm::mpi::Session,
    ulysses::comm::{CommError, LaunchError, LaunchOptions, ProcessGroup, ProcessGroupExt},
};

/// This process among those of a run.
#[derive(Default)]
pub(super) struct Host {
    #[cfg(feature = "mpi")]
    session: Option<Session>,
}

#[cfg(not(feature = "mpi"))]
impl Host {
    /// Nothing to do for threads.
    pub(super) fn enter(&mut self, config: &Config, by_flag: bool) -> Result<(), Failure> {
        if config.backend == Backend::Mpi { Err(lacks_backend("mpi", by_flag)) } else { Ok(()) }
    }

    /// How many of a world's ranks share this machine.
    pub(super) fn local_ranks(&self, world_size: usize) -> usize {
        world_size
    }

    /// Whether this process owns the output directory.
    pub(super) fn is_first(&self) -> bool {
        true
    }

    /// What this process has, once all have theirs.
    pub(super) fn agree<T>(&mut self, own: Result<T, Failure>) -> Result<T, Failure> {
        own
    }

    /// What the first process has.
    pub(super) fn of_first<T>(&mut self, own: T) -> Result<T, Failure> {
        Ok(own)
    }

    /// Trains on all ranks.
    pub(super) fn launch(&mut self, run: &Run) -> Result<Vec<RankOutcome>, Failure> {
        run.launch()
    }
}

#[cfg(feature = "mpi")]
impl Host {
    /// Joins the job, if ranks are processes: as many as the mesh has.
    pub(super) fn enter(&mut self, config: &Config, _by_flag: bool) -> Result<(), Failure> {
        if config.backend != Backend::Mpi {
            return Ok(());
        }
        let session = Session::start().or_run()?;
        let (rank, processes) = (session.rank(), session.world_size());
        self.session = Some(session);
        if rank > 0 {
            silence(true);
        }
        let Config { dp_size, sp_size, .. } = config;
        if dp_size * sp_size == processes {
            return Ok(());
        }
        Err(Failure::Usage(anyhow!(
            "the mesh dp {dp_size} × sp {sp_size} has {} ranks, but MPI has started {processes} process(es): start \
             `mpirun -np {}`, or choose another --mesh",
            dp_size * sp_size,
            dp_size * sp_size
        )))
    }

    /// How many of a world's ranks share this machine.
    pub(super) fn local_ranks(&self, world_size: usize) -> usize {
        self.session.as_ref().map_or(world_size, Session::local_size)
    }

    /// Whether this process owns the output directory.
    pub(super) fn is_first(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.rank() == 0)
    }

    /// What this process has, once all have theirs. Of several that have failed, the first says why.
    pub(super) fn agree<T>(&mut self, own: Result<T, Failure>) -> Result<T, Failure> {
        let Some(session) = &mut self.session else { return own };
        let exit_code = match &own {
            Ok(_) => None,
            Err(Failure::Usage(_)) => Some(2),
            Err(_) => Some(1),
        };
        let all: Vec<Option<u8>> = tell_all(session, &exit_code)?;
        let Some(refusing) = all.iter().position(Option::is_some) else { return own };
        silence(refusing != session.rank());
        let elsewhere = || anyhow!("rank {refusing} cannot start");
        match (own, all[refusing]) {
            (Err(failure), _) => Err(failure),
            (Ok(_), Some(2)) => Err(Failure::Usage(elsewhere())),
            (Ok(_), _) => Err(Failure::Run(elsewhere())),
        }
    }

    /// What the first process has.
    pub(super) fn of_first<T: Serialize + DeserializeOwned>(&mut self, own: T) -> Result<T, Failure> {
        let Some(session) = &mut self.session else { return Ok(own) };
        tell_all(session, &own)?.into_iter().next().context("a job has a process").or_run()
    }

    /// Trains on all ranks; every process gets to know how each of them ended.
    pub(super) fn launch(&mut self, run: &Run) -> Result<Vec<RankOutcome>, Failure> {
        let Some(session) = &mut self.session else { return run.launch() };
        let own = session.rank();
        let outcomes = session.run(&run.launch, |rank| {
            let outcome = run.train(&rank, Device::Cpu)?;
            exchange(&*rank.group, &outcome)
        });
        outcomes.map_err(|error| {
            silence(speaker(&error, own) != own);
            failure(error)
        })
    }
}

/// What every process has, in rank order.
#[cfg(feature = "mpi")]
fn tell_all<T: Serialize + DeserializeOwned>(session: &mut Session, own: &T) -> Result<Vec<T>, Failure> {
    let own = serde_json::to_vec(own).or_run()?;
    let all = session.run(&LaunchOptions::default(), |rank| rank.group.all_gather_varied(&own)).or_run()?;
    all.iter().map(|told| serde_json::from_slice(told)).collect::<Result<_, _>>().or_run()
}

/// Every rank's outcome, in rank order.
#[cfg(feature = "mpi")]
fn exchange(group: &dyn ProcessGroup, outcome: &RankOutcome) -> anyhow::Result<Vec<RankOutcome>> {
    let outcomes = group.all_gather_varied(&serde_json::to_vec(outcome)?)?;
    let parse = |outcome: &Vec<u8>| serde_json::from_slice(outcome).context("a rank's outcome");
    outcomes.iter().map(parse).collect()
}

/// The rank that tells the user of a failure: the one whose own it is, or of many that were told the
/// same the first that can.
#[cfg(feature = "mpi")]
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
