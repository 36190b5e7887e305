//! A thread that lets messages move while their rank computes.

use super::rank::MpiRank;
use std::sync::Weak;
use std::thread::{Builder, Thread};
use std::time::Duration;

/// Pause between calls of MPI: a call takes microseconds, so the thread takes one or two percent of a core.
const PAUSE: Duration = Duration::from_micros(100);

/// Starts the thread. It is parked while nothing is in flight, and ends with the rank.
pub(super) fn start(rank: Weak<MpiRank>) -> std::io::Result<Thread> {
    let run = move || {
        while let Some(is_in_flight) = rank.upgrade().and_then(|rank| rank.move_messages()) {
            match is_in_flight {
                true => std::thread::sleep(PAUSE),
                false => std::thread::park(),
            }
        }
    };
    Ok(Builder::new().name("mpi-progress".to_owned()).spawn(run)?.thread().clone())
}
