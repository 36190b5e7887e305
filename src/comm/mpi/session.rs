//! A process's session of an MPI job, which runs it as a rank.

use super::backoff::{Backoff, CpuContention};
use super::group::MpiGroup;
use super::library::Communicator;
use super::rank::MpiRank;
use super::transfers::Members;
use crate::comm::launch::{LaunchError, LaunchOptions, RankContext, run_rank};
use crate::comm::session::BoxedError;
use crate::comm::{CommError, Membership, ProcessGroup, ProcessGroupExt, RankMain};
use ::mpi::Threading;
use ::mpi::environment::Universe;
use candle_core::Device;
use std::error::Error;
use std::sync::Arc;

/// A process of an MPI job, from `MPI_Init` to `MPI_Finalize`, which is called on drop.
///
/// ```no_run
/// use ulysses::comm::{CommError, LaunchOptions, ProcessGroupExt, ReduceOp, mpi::Session};
///
/// // Started by `mpirun -np 4 PROGRAM`: every process is a rank.
/// let mut session = Session::start()?;
/// let sum = session.run(&LaunchOptions::default(), |context| -> Result<f32, CommError> {
///     Ok(context.group.all_reduce_values(&[context.rank as f32], ReduceOp::Sum)?[0])
/// })?;
/// assert_eq!(sum, 6.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Session {
    universe: Option<Universe>,
    rank: usize,
    world_size: usize,
    local_size: usize,
}

impl Session {
    /// Initializes MPI, once per process. A process without a launcher is a job of one rank.
    ///
    /// # Errors
    /// [`CommError::Start`] if MPI was initialized before, or does not support calls from a rank's thread.
    pub fn start() -> Result<Self, CommError> {
        let refuse = |reason: String| CommError::Start { library: "MPI", rank: None, reason };
        let (universe, threading) = ::mpi::initialize_with_threading(Threading::Serialized)
            .ok_or_else(|| refuse("it was already initialized in this process".to_owned()))?;
        if threading < Threading::Serialized {
            return Err(refuse(format!(
                "it supports calls from the main thread only ({threading:?}); ranks need MPI_THREAD_SERIALIZED"
            )));
        }
        let all = Communicator::world();
        let local_size = match all.split_by_host().map_err(refuse)? {
            Some(local) => {
                let size = local.size();
                local.free().and(size).map_err(refuse)?
            }
            None => 1,
        };
        let (rank, world_size) = (all.rank().map_err(refuse)?, all.size().map_err(refuse)?);
        Ok(Self { universe: Some(universe), rank, world_size, local_size })
    }

    /// Runs `run` as this process's rank, on its own thread with its own rayon pool, and
    /// returns when all ranks have returned. Collective: every process calls it.
    ///
    /// A rank that panics or returns an error fails all groups: operations of the other ranks return
    /// [`CommError::PeerFailed`], which names it. If a rank returns while others wait for it, they get
    /// [`CommError::PeerLeft`].
    ///
    /// # Errors
    /// The failure of this rank, which may follow from that of another.
    pub fn run<T, E, F>(&mut self, options: &LaunchOptions, run: F) -> Result<T, LaunchError>
    where
        T: Send,
        E: Into<Box<dyn Error + Send + Sync>>,
        F: Fn(RankContext) -> Result<T, E> + Sync,
    {
        let outcome = self.run_on(self.world_size, options, run)?;
        outcome.ok_or(LaunchError::InvalidOptions {
            world_size: self.world_size,
            threads_per_rank: options.threads_per_rank,
        })
    }

    /// As [`run`](Self::run), on the first `world_size` processes only; the others get `None` at once.
    ///
    /// # Errors
    /// As for [`run`](Self::run), and a `world_size` of 0 or above the number of processes.
    pub fn run_on<T, E, F>(
        &mut self,
        world_size: usize,
        options: &LaunchOptions,
        run: F,
    ) -> Result<Option<T>, LaunchError>
    where
        T: Send,
        E: Into<Box<dyn Error + Send + Sync>>,
        F: Fn(RankContext) -> Result<T, E> + Sync,
    {
        let (rank, threads) = (self.rank, options.threads_per_rank);
        if world_size == 0 || world_size > self.world_size || threads == 0 {
            return Err(LaunchError::InvalidOptions { world_size, threads_per_rank: threads });
        }
        let refuse = |reason: String| {
            let source = CommError::Start { library: "MPI", rank: Some(rank), reason };
            LaunchError::Failed { rank, source: source.into() }
        };
        let color = (rank < world_size).then_some(0);
        let all = Communicator::world();
        let created = wait_for_all(all).and_then(|()| all.split(color, rank)).map_err(refuse)?;
        let Some(communicator) = created else { return Ok(None) };
        let own = Arc::new(MpiRank::new(communicator, rank, world_size, options));
        let membership = Membership::new(&options.name, (0..world_size).collect(), rank);
        let members = Members::new(communicator, membership);
        let group: Arc<dyn ProcessGroup> = Arc::new(MpiGroup::new(own.clone(), members));
        let outcome = on_own_thread(RankContext { rank, world_size, threads, group }, &run);
        if let Err(error) = &outcome {
            own.abort(error.reason());
        }
        if !own.leave() {
            // `MPI_Finalize` would wait for the ranks that hang. If a process ends without it, the launcher ends
            // the others.
            std::mem::forget(self.universe.take());
        }
        outcome.map(Some)
    }
}

impl crate::comm::Session for Session {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn local_size(&self) -> usize {
        self.local_size
    }

    fn uses_mpi(&self) -> bool {
        true
    }

    fn run_rank(&mut self, options: &LaunchOptions, run: RankMain<'_>) -> Result<(), LaunchError> {
        self.run(options, |rank| run(&rank, Device::Cpu))
    }

    fn all_gather_bytes(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, BoxedError> {
        Ok(self.run(&LaunchOptions::default(), |rank| rank.group.all_gather_varied(own))?)
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { universe: _, rank, world_size, local_size } = self;
        write!(f, "Session(rank {rank} of {world_size}, {local_size} on this host)")
    }
}

/// Waits for all processes. A split would wait too, but inside MPI, which never sleeps: processes that arrive early
/// would take CPU time from those that they wait for.
fn wait_for_all(all: Communicator) -> Result<(), String> {
    let (contention, mut request) = (CpuContention::default(), all.begin_barrier()?);
    let mut backoff = Backoff::new(&contention);
    while request.test()?.is_none() {
        backoff.wait();
    }
    Ok(())
}

/// Runs a rank on its own thread, since memory is counted by thread and a rayon pool belongs to one.
fn on_own_thread<T, E, F>(context: RankContext, run: &F) -> Result<T, LaunchError>
where
    T: Send,
    E: Into<Box<dyn Error + Send + Sync>>,
    F: Fn(RankContext) -> Result<T, E> + Sync,
{
    let rank = context.rank;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(format!("rank-{rank}"));
        let spawned = thread.spawn_scoped(scope, || run_rank(context, run));
        let spawned = spawned.map_err(|source| LaunchError::Spawn { rank, source })?;
        spawned.join().unwrap_or_else(|panic| Err(LaunchError::panicked(rank, &*panic)))
    })
}
