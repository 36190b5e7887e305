//! What all ranks and groups of one launch share: the failure, and the signals.

use super::signal::Signal;
use crate::comm::CommError;
use crate::comm::diagnostics::{Entry, FlightRecorder, HangReport, Wait};
use parking_lot::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The ranks of one launch.
#[derive(Debug)]
pub(super) struct ThreadWorld {
    timeout: Duration,
    failure: OnceLock<Failure>,
    left: Box<[AtomicBool]>,
    signals: Box<[Signal]>,
    recorders: Box<[Mutex<FlightRecorder>]>,
    /// What each rank sleeps for.
    waits: Box<[Mutex<Option<Wait>>]>,
}

/// The first failure; all ranks get this one.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: CommError,
    /// The rank that noticed: its own outcome is what the launch reports.
    pub(super) reporter: usize,
}

impl ThreadWorld {
    pub(super) fn new(world_size: usize, timeout: Duration) -> Self {
        Self {
            timeout,
            failure: OnceLock::new(),
            left: (0..world_size).map(|_| AtomicBool::new(false)).collect(),
            signals: (0..world_size).map(|_| Signal::default()).collect(),
            recorders: (0..world_size).map(|_| Mutex::default()).collect(),
            waits: (0..world_size).map(|_| Mutex::default()).collect(),
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(super) fn signal(&self, rank: usize) -> &Signal {
        &self.signals[rank]
    }

    pub(super) fn notify(&self, ranks: &[usize]) {
        ranks.iter().for_each(|&rank| self.signals[rank].notify());
    }

    pub(super) fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Fails the world, unless it has failed before; returns the error that counts.
    pub(super) fn fail(&self, reporter: usize, error: CommError) -> CommError {
        let failure = self.failure.get_or_init(|| Failure { error, reporter });
        self.signals.iter().for_each(Signal::notify);
        failure.error.clone()
    }

    /// The error that counts, once there is one.
    pub(super) fn check(&self) -> Result<(), CommError> {
        self.failure().map_or(Ok(()), |failure| Err(failure.error.clone()))
    }

    /// Stores what a rank has called.
    pub(super) fn record(&self, rank: usize, entry: Entry) {
        self.recorders[rank].lock().record(entry);
    }

    /// Notes that an operation of a rank is complete.
    pub(super) fn complete(&self, rank: usize, id: u64) {
        self.recorders[rank].lock().complete(id);
    }

    /// Notes what a rank is about to sleep for, or that it sleeps no more.
    pub(super) fn note_wait(&self, rank: usize, wait: Option<Wait>) {
        *self.waits[rank].lock() = wait;
    }

    /// What every rank has called last, and what those that sleep wait for.
    pub(super) fn hang_report(&self) -> HangReport {
        let mut report = HangReport::default();
        for (rank, (recorder, wait)) in self.recorders.iter().zip(&self.waits).enumerate() {
            report.note(rank, recorder.lock().report(), wait.lock().clone());
        }
        report
    }

    /// Notes that a rank issues nothing any more.
    pub(super) fn leave(&self, rank: usize) {
        self.left[rank].store(true, Ordering::SeqCst);
        self.signals.iter().for_each(Signal::notify);
    }

    /// The ranks that have left.
    pub(super) fn left(&self) -> Vec<usize> {
        (0..self.left.len()).filter(|&rank| self.left[rank].load(Ordering::SeqCst)).collect()
    }
}
