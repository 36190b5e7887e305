//! What it takes to be a rank, for every backend: options, context, pool, outcome.

use super::{CommError, ProcessGroup};
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
    /// Compares the calls of all ranks before data moves, so that ranks that diverge get
    /// [`CommError::Desync`] with both calls. Threads always compare; processes send messages for it.
    pub check: bool,
}

impl Default for LaunchOptions {
    /// One thread per rank, a timeout of five minutes, the name `"world"`, no comparison where it
    /// costs messages.
    fn default() -> Self {
        let timeout = Duration::from_secs(300);
        Self { threads_per_rank: 1, timeout, name: "world".to_owned(), check: false }
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

    /// What the other ranks are told.
    pub(super) fn reason(&self) -> String {
        match self {
            LaunchError::Failed { source, .. } => source.to_string(),
            LaunchError::Panicked { message, .. } => format!("panicked: {message}"),
            other => other.to_string(),
        }
    }

    pub(super) fn panicked(rank: usize, panic: &(dyn std::any::Any + Send)) -> Self {
        let message = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
        LaunchError::Panicked { rank, message: message.unwrap_or_else(|| "no message".to_owned()) }
    }

    /// The communication error that the rank returned, if it was one.
    pub fn comm_error(&self) -> Option<&CommError> {
        match self {
            LaunchError::Failed { source, .. } => source.downcast_ref(),
            _ => None,
        }
    }
}

/// The body of a rank's thread.
pub(super) fn run_rank<T, E, F>(context: RankContext, run: &F) -> Result<T, LaunchError>
where
    E: Into<Box<dyn Error + Send + Sync>>,
    F: Fn(RankContext) -> Result<T, E>,
{
    let rank = context.rank;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(context.threads)
        .thread_name(move |index| format!("rank-{rank}.{index}"))
        .use_current_thread()
        .build()
        .map_err(|source| LaunchError::ThreadPool { rank, source })?;
    // Nothing of the rank's is seen after a panic: its groups have failed.
    let outcome = catch_unwind(AssertUnwindSafe(|| run(context)));
    drop(pool);
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(LaunchError::Failed { rank, source: error.into() }),
        Err(panic) => Err(LaunchError::panicked(rank, &*panic)),
    }
}
