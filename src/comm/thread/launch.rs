//! Launching ranks as threads.

use super::communicator::Communicator;
use super::group::ThreadGroup;
use super::rank_state::RankState;
use super::world::ThreadWorld;
use crate::comm::launch::{LaunchError, LaunchOptions, RankContext, run_rank};
use crate::comm::{CommError, GroupLabel};
use std::error::Error;
use std::num::NonZero;
use std::sync::Arc;

/// Runs `run` on `world_size` ranks, each a thread named `rank-N` with its own rayon pool,
/// and returns their results in rank order.
///
/// A rank that panics or returns an error fails all groups: operations of the other ranks
/// return [`CommError::PeerFailed`], which names it. If a rank returns while others
/// wait for it, they get [`CommError::PeerLeft`]. All ranks are joined before this
/// function returns.
///
/// # Errors
/// The first failure, as reported by its rank.
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
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let mut world = ThreadWorld::new(world_size, options.timeout);
    world.has_free_core = world_size.saturating_mul(threads_per_rank) < cores;
    let world = Arc::new(world);
    let label = Arc::new(GroupLabel { name: options.name.clone(), members: (0..world_size).collect() });
    let comm = Arc::new(Communicator::new(label, world.clone()));
    let rank_main = |rank: usize| {
        let state = Arc::new(RankState::new(rank, world.clone()));
        let group = Arc::new(ThreadGroup::new(state, comm.clone(), rank));
        let outcome = run_rank(RankContext { rank, world_size, threads: threads_per_rank, group }, &run);
        if let Err(error) = &outcome {
            world.fail(rank, CommError::PeerFailed { rank, reason: error.reason() });
        }
        world.leave(rank);
        outcome
    };
    let outcomes: Vec<Result<T, LaunchError>> = std::thread::scope(|scope| {
        let spawn = |rank: usize| {
            let thread = std::thread::Builder::new().name(format!("rank-{rank}"));
            let spawned = thread.spawn_scoped(scope, move || rank_main(rank));
            spawned.map_err(|source| {
                // Otherwise the ranks that have started would wait for this one.
                world.fail(rank, CommError::PeerFailed { rank, reason: format!("cannot start: {source}") });
                LaunchError::Spawn { rank, source }
            })
        };
        let threads: Vec<_> = (0..world_size).map(spawn).collect();
        let join = |(rank, thread): (usize, Result<std::thread::ScopedJoinHandle<'_, _>, _>)| {
            thread?.join().unwrap_or_else(|panic| Err(LaunchError::panicked(rank, &*panic)))
        };
        threads.into_iter().enumerate().map(join).collect()
    });
    first_failure(outcomes, world.failure().map(|failure| failure.reporter))
}

/// Returns all values, or the error of the rank that first noticed the world's failure.
fn first_failure<T>(
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
