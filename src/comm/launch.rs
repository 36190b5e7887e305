//! The parts of launching a rank that all backends share: options, context, thread pool, outcome.

use super::error::with_causes;
use super::{CommError, ProcessGroup};
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Options for starting the ranks of a world.
#[derive(Debug, Clone)]
pub struct LaunchOptions {
    /// Threads in each rank's own rayon pool, including the rank's thread. With 1,
    /// no further thread is started.
    pub threads_per_rank: usize,
    /// Time limit for a rank's wait for its peers in one operation; then the world fails.
    pub timeout: Duration,
    /// Name of the group of all ranks.
    pub name: String,
    /// Compares the calls of all ranks before data moves. Ranks with different calls get
    /// [`CommError::Desync`] with both calls. Threads always compare; processes send messages for it.
    pub check: bool,
}

impl Default for LaunchOptions {
    /// One thread per rank, a timeout of five minutes, the name `"world"`, no desync check where it
    /// costs messages.
    fn default() -> Self {
        let timeout = Duration::from_secs(300);
        Self { threads_per_rank: 1, timeout, name: "world".to_owned(), check: false }
    }
}

/// The context passed to each rank's function.
///
/// # Examples
///
/// ```
/// use ulysses::comm::{CommError, LaunchOptions, RankContext, ReduceOp, ProcessGroupExt, launch};
///
/// fn mean_rank(context: &RankContext) -> Result<f64, CommError> {
///     let sum = context.group.all_reduce_values(&[context.rank as f64], ReduceOp::Sum)?;
///     Ok(sum[0] / context.world_size as f64)
/// }
/// assert_eq!(launch(4, &LaunchOptions::default(), |context| mean_rank(&context))?, [1.5; 4]);
/// # Ok::<(), ulysses::comm::LaunchError>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct RankContext {
    /// This rank, from 0.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Threads of the rank's rayon pool. Rayon uses this pool when called on the rank's
    /// thread.
    pub threads: usize,
    /// The group of all ranks.
    pub group: Arc<dyn ProcessGroup>,
}

/// An error of a launch: the first failure of a rank, not the failures that followed from it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A world without ranks, or ranks without threads.
    #[error("cannot launch {world_size} rank(s) of {threads_per_rank} thread(s): both must be at least 1")]
    InvalidOptions {
        /// Number of ranks requested.
        world_size: usize,
        /// Threads per rank requested.
        threads_per_rank: usize,
    },
    /// The operating system could not start a thread.
    #[error("cannot start the thread of rank {rank}: {source}")]
    Spawn {
        /// The rank.
        rank: usize,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The rank's rayon pool could not be created.
    #[error("cannot start the rayon pool of rank {rank}: {source}")]
    ThreadPool {
        /// The rank.
        rank: usize,
        /// rayon's error.
        source: rayon::ThreadPoolBuildError,
    },
    /// A rank returned an error.
    #[error("rank {rank} failed: {}", with_causes(&**source))]
    Failed {
        /// The rank.
        rank: usize,
        /// The rank's error.
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

    /// The failure reason sent to the other ranks.
    pub(super) fn reason(&self) -> String {
        match self {
            LaunchError::Failed { source, .. } => with_causes(&**source),
            LaunchError::Panicked { message, .. } => format!("panicked: {message}"),
            other => other.to_string(),
        }
    }

    pub(super) fn panicked(rank: usize, panic: &(dyn std::any::Any + Send)) -> Self {
        let message = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
        LaunchError::Panicked { rank, message: message.unwrap_or_else(|| "no message".to_owned()) }
    }

    /// The communication error that the rank returned, if any.
    pub fn comm_error(&self) -> Option<&CommError> {
        match self {
            LaunchError::Failed { source, .. } => source.downcast_ref(),
            _ => None,
        }
    }
}

/// Runs a rank on its thread: creates its pool and catches panics.
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
    // Unwind-safe: no state of the rank is used after a panic, since its groups have failed.
    let outcome = catch_unwind(AssertUnwindSafe(|| run(context)));
    drop(pool);
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(LaunchError::Failed { rank, source: error.into() }),
        Err(panic) => Err(LaunchError::panicked(rank, &*panic)),
    }
}
