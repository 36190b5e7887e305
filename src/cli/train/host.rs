//! Where a run's ranks are: threads of this process, or processes of an MPI job, of which this is one.

use super::{RankOutcome, Run};
use crate::cli::Failure;
use ulysses::config::{Backend, Config};
#[cfg(feature = "mpi")]
use {
    super::failure,
    crate::cli::{OrFail, silence},
    anyhow::{Context, anyhow},
    candle_core::Device,
    serde::{Deserialize, Serialize},
    std::path::PathBuf,
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
    pub(super) fn enter(&mut self, config: &Config) -> Result<(), Failure> {
        if config.backend == Backend::Mpi {
            let message = "--backend mpi: this build lacks the feature `mpi`; `thread` is valid";
            return Err(Failure::Usage(anyhow::anyhow!(message)));
        }
        Ok(())
    }

    /// How many of a world's ranks share this machine.
    pub(super) fn local_ranks(&self, world_size: usize) -> usize {
        world_size
    }

    /// Whether this process owns the output directory.
    pub(super) fn is_first(&self) -> bool {
        true
    }

    /// The run, once all processes can begin it.
    pub(super) fn agree(&mut self, prepared: Result<Run, Failure>) -> Result<Run, Failure> {
        prepared
    }

    /// Trains on all ranks.
    pub(super) fn launch(&mut self, run: &Run) -> Result<Vec<RankOutcome>, Failure> {
        run.launch()
    }
}

#[cfg(feature = "mpi")]
impl Host {
    /// Joins the job, if ranks are processes: as many as the mesh has.
    pub(super) fn enter(&mut self, config: &Config) -> Result<(), Failure> {
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

    /// The run, once all processes can begin it, with the output directory and the name that the first
    /// one gave it. Of several that cannot, the first says why.
    pub(super) fn agree(&mut self, prepared: Result<Run, Failure>) -> Result<Run, Failure> {
        let Some(session) = &mut self.session else { return prepared };
        let told = serde_json::to_vec(&Told::of(&prepared)).or_run()?;
        let all = session.run(&LaunchOptions::default(), |rank| rank.group.all_gather_varied(&told));
        let all = all.or_run()?;
        let parse = |told: &Vec<u8>| serde_json::from_slice::<Told>(told);
        let all = all.iter().map(parse).collect::<Result<Vec<_>, _>>().or_run()?;
        if let Some(refusing) = all.iter().position(|told| told.exit_code.is_some()) {
            silence(refusing != session.rank());
            let elsewhere = || anyhow!("rank {refusing} cannot start");
            return match (prepared, all[refusing].exit_code) {
                (Err(failure), _) => Err(failure),
                (Ok(_), Some(2)) => Err(Failure::Usage(elsewhere())),
                (Ok(_), _) => Err(Failure::Run(elsewhere())),
            };
        }
        let run = prepared?;
        let Some(Told { output, run_id, .. }) = all.into_iter().next() else { return Ok(run) };
        Ok(Run { output, new_run_id: run_id, ..run })
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

/// What processes tell one another before a run.
#[cfg(feature = "mpi")]
#[derive(Serialize, Deserialize)]
struct Told {
    /// Why the process cannot begin, as an exit code.
    exit_code: Option<u8>,
    output: PathBuf,
    run_id: String,
}

#[cfg(feature = "mpi")]
impl Told {
    fn of(prepared: &Result<Run, Failure>) -> Self {
        let (exit_code, output, run_id) = match prepared {
            Ok(run) => (None, run.output.clone(), run.new_run_id.clone()),
            Err(Failure::Usage(_)) => (Some(2), PathBuf::new(), String::new()),
            Err(_) => (Some(1), PathBuf::new(), String::new()),
        };
        Self { exit_code, output, run_id }
    }
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
