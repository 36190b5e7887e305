//! A thread that copies the data of a rank's exchanges and messages while the rank computes.
//!
//! It moves data and completes nothing: the rank's own thread frees what it has allocated, so memory can be counted
//! by thread.

use super::rank_state::RankState;
use crate::comm::CommError;
use std::sync::{Arc, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Interval at which the thread checks whether its rank still exists, if nothing wakes it.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the thread, which ends with the rank.
pub(super) fn start(rank: &Arc<RankState>) -> Result<(), CommError> {
    let refuse = |reason: String| CommError::Tensor(format!("cannot start a thread: {reason}"));
    let (global_rank, world, rank) = (rank.global_rank, rank.world.clone(), Arc::downgrade(rank));
    let run = move || {
        let signal = world.signal(global_rank);
        let has_ended = || world.failure().is_some() || world.left().contains(&global_rank);
        loop {
            let seen = signal.epoch();
            let Some(rank) = Weak::upgrade(&rank).filter(|_| !has_ended()) else { return };
            if let Err(error) = rank.pull_exchanges() {
                rank.fail(error);
            }
            drop(rank);
            signal.sleep(seen, Instant::now() + CHECK_INTERVAL);
        }
    };
    let pool = || rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
    let in_own_pool = move || {
        // Without a pool of its own, kernels would start rayon's global one.
        let Ok(_pool) = pool() else { return };
        run();
    };
    let thread = Builder::new().name(format!("rank-{global_rank}.exchange"));
    thread.spawn(in_own_pool).map(drop).map_err(|error| refuse(error.to_string()))
}
