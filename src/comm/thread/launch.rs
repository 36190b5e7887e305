//! Starting ranks as threads.

use super::communicator::Communicator;
use super::engine::RankState;
use super::group::ThreadGroup;
use super::world::World;
use crate::comm::{CommError, ProcessGroup};
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// How to start the ranks of a world.
#[derive(Debug, Clone)]
pub struct LaunchOptions {
    /// Threads of each rank's own rayon pool, the rank's thread included. With one,
    /// no further thread is started.
    pub threads_per_rank: usize,
    /// How long a rank waits for its peers in one operation before it fails the world.
    pub timeout: Duration,
    /// Name of the group of all ranks.
    pub name: String,
}

impl Default for LaunchOptions {
    /// One thread per rank, a timeout of five minutes, the name `"world"`.
    fn default() -> Self {
        Self { threads_per_rank: 1, timeout: Duration::from_secs(300), name: "world".to_owned() }
    }
}

/// What a rank is given.
#[derive(Debug)]
#[non_exhaustive]
pub struct RankContext {
    /// This rank, from 0.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Threads of the rank's rayon pool, which rayon uses when called on the rank's
    /// thread.
    pub threads: usize,
    /// The group of all ranks.
    pub group: Arc<dyn ProcessGroup>,
}

/// Why a launch failed: the first rank's failure, not those that followed from it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A world of no ranks, or ranks of no threads.
    #[error("cannot launch {world_size} rank(s) of {threads_per_rank} thread(s): both must be at least 1")]
    InvalidOptions {
        /// Ranks asked for.
        world_size: usize,
        /// Threads asked for.
        threads_per_rank: usize,
    },
    /// The operating system gave no thread.
    #[error("cannot start the thread of rank {rank}")]
    Spawn {
        /// The rank.
        rank: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The rank's own pool could not be made.
    #[error("cannot start the rayon pool of rank {rank}")]
    ThreadPool {
        /// The rank.
        rank: usize,
        /// rayon's reason.
        source: rayon::ThreadPoolBuildError,
    },
    /// A rank returned an error.
    #[error("rank {rank} failed")]
    Failed {
        /// The rank.
        rank: usize,
        /// What it returned.
        source: Box<dyn Error + Send + Sync>,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
}

impl LaunchError {
    /// The rank that failed, if one did.
    pub fn rank(&self) -> Option<usize> {
        match self {
            LaunchError::InvalidOptions { .. } => None,
            LaunchError::Spawn { rank, .. }
            | LaunchError::ThreadPool { rank, .. }
            | LaunchError::Failed { rank, .. }
            | LaunchError::Panicked { rank, .. } => Some(*rank),
        }
    }

    /// The communication error that the rank returned, if it was one.
    pub fn comm_error(&self) -> Option<&CommError> {
        match self {
            LaunchError::Failed { source, .. } => source.downcast_ref(),
            _ => None,
        }
    }
}

/// Runs `run` on `world_size` ranks, each a thread named `rank-N` with a rayon pool of
/// its own, and returns what they return, in rank order.
///
/// A rank that panics or returns an error fails all groups: the others' operations
/// return [`CommError::PeerFailed`], which names it. A rank that returns while others
/// count on it gives them [`CommError::PeerLeft`]. All ranks are joined before this
/// function returns.
///
/// # Errors
/// The failure that came first, as its rank tells it.
pub fn launch<T, E, F>(world_size: usize, options: &LaunchOptions, run: F) -> Result<Vec<T>, LaunchError>
where
    T: Send,
    E: Into<Box<dyn Error + Send + Sync>>,
    F: Fn(RankContext) -> Result<T, E> + Sync,
{
    let threads_per_rank = options.threads_per_rank;
    if world_size == 0 || threads_per_rank == 0 {
        return Err(LaunchError::InvalidOptions { world_size, threads_per_rank });
    }
    let world = Arc::new(World::new(world_size, options.timeout));
    let comm = Arc::new(Communicator::new(&options.name, world.clone(), (0..world_size).collect()));
    let rank_main = |rank: usize| {
        let outcome = start_rank(rank, &comm, threads_per_rank, &run);
        if let Err(error) = &outcome {
            world.fail(rank, CommError::PeerFailed { rank, reason: reason_of(error) });
        }
        world.leave(rank);
        outcome
    };
    let outcomes: Vec<Result<T, LaunchError>> = std::thread::scope(|scope| {
        let spawn = |rank: usize| {
            let thread = std::thread::Builder::new().name(format!("rank-{rank}"));
            let spawned = thread.spawn_scoped(scope, move || rank_main(rank));
            spawned.map_err(|source| {
                // The ranks already started would wait for this one.
                world.fail(rank, CommError::PeerFailed { rank, reason: format!("cannot start: {source}") });
                LaunchError::Spawn { rank, source }
            })
        };
        let threads: Vec<_> = (0..world_size).map(spawn).collect();
        let join = |(rank, thread): (usize, Result<std::thread::ScopedJoinHandle<'_, _>, _>)| {
            thread?
                .join()
                .unwrap_or_else(|panic| Err(LaunchError::Panicked { rank, message: message_of(&*panic) }))
        };
        threads.into_iter().enumerate().map(join).collect()
    });
    original(outcomes, world.failure().map(|failure| failure.reporter))
}

/// The body of a rank's thread.
fn start_rank<T, E, F>(
    rank: usize,
    comm: &Arc<Communicator>,
    threads: usize,
    run: &F,
) -> Result<T, LaunchError>
where
    E: Into<Box<dyn Error + Send + Sync>>,
    F: Fn(RankContext) -> Result<T, E>,
{
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(move |index| format!("rank-{rank}.{index}"))
        .use_current_thread()
        .build()
        .map_err(|source| LaunchError::ThreadPool { rank, source })?;
    let state = Arc::new(RankState::new(rank, comm.world.clone()));
    let group = Arc::new(ThreadGroup::new(state, comm.clone(), rank));
    let context = RankContext { rank, world_size: comm.world_size(), threads, group };
    // Nothing of the rank's is seen after a panic: its groups have failed.
    let outcome = catch_unwind(AssertUnwindSafe(|| run(context)));
    drop(pool);
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(LaunchError::Failed { rank, source: error.into() }),
        Err(panic) => Err(LaunchError::Panicked { rank, message: message_of(&*panic) }),
    }
}

/// All values, or the error of the rank that noticed the world's failure first.
fn original<T>(
    outcomes: Vec<Result<T, LaunchError>>,
    reporter: Option<usize>,
) -> Result<Vec<T>, LaunchError> {
    let mut values = Vec::with_capacity(outcomes.len());
    let mut first: Option<LaunchError> = None;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(value) => values.push(value),
            Err(error) if first.is_none() || Some(rank) == reporter => first = Some(error),
            Err(_) => {}
        }
    }
    first.map_or(Ok(values), Err)
}

fn reason_of(error: &LaunchError) -> String {
    match error {
        LaunchError::Failed { source, .. } => source.to_string(),
        LaunchError::Panicked { message, .. } => format!("panicked: {message}"),
        other => other.to_string(),
    }
}

fn message_of(panic: &(dyn std::any::Any + Send)) -> String {
    let message = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
