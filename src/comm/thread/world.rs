//! State shared by all ranks and groups of one launch: the failure and the signals.

use super::signal::Signal;
use crate::comm::diagnostics::{CallReport, FlightRecorder, HangReport, OpLabel, Wait};
use crate::comm::{CallSignature, CommError};
use parking_lot::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The ranks of one launch.
#[derive(Debug)]
pub(super) struct ThreadWorld {
    timeout: Duration,
    /// Whether the machine has more cores than the ranks have threads.
    pub(super) has_free_core: bool,
    failure: OnceLock<Failure>,
    left: Box<[AtomicBool]>,
    signals: Box<[Signal]>,
    recorders: Box<[Mutex<FlightRecorder>]>,
    /// The wait of each sleeping rank.
    waits: Box<[Mutex<Option<Wait>>]>,
}

/// The first failure, which all ranks return.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: CommError,
    /// The rank that noticed it; the launch reports the error of this rank.
    pub(super) reporter: usize,
}

impl ThreadWorld {
    pub(super) fn new(world_size: usize, timeout: Duration) -> Self {
        Self {
            timeout,
            has_free_core: false,
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

    /// Fails the world, unless it has failed before. Returns the first error.
    pub(super) fn fail(&self, reporter: usize, error: CommError) -> CommError {
        let failure = self.failure.get_or_init(|| Failure { error, reporter });
        self.signals.iter().for_each(Signal::notify);
        failure.error.clone()
    }

    /// Returns the first error, if there is one.
    pub(super) fn check(&self) -> Result<(), CommError> {
        self.failure().map_or(Ok(()), |failure| Err(failure.error.clone()))
    }

    /// Records a call of a rank. Returns its number.
    pub(super) fn record(&self, rank: usize, label: OpLabel, call: CallSignature) -> u64 {
        self.recorders[rank].lock().record(label, call)
    }

    /// Marks an operation of a rank as complete.
    pub(super) fn complete(&self, rank: usize, id: u64) {
        self.recorders[rank].lock().complete(id);
    }

    /// Stores what a rank is about to sleep for, or that it is awake.
    pub(super) fn note_wait(&self, rank: usize, wait: Option<Wait>) {
        *self.waits[rank].lock() = wait;
    }

    /// Builds the hang report: the last calls of every rank, and the waits of sleeping ranks.
    pub(super) fn hang_report(&self) -> HangReport {
        let mut report = HangReport::default();
        for (rank, (recorder, wait)) in self.recorders.iter().zip(&self.waits).enumerate() {
            report.note(rank, CallReport { calls: recorder.lock().report(), wait: wait.lock().clone() });
        }
        report
    }

    /// Marks a rank as returned: it issues no more operations.
    pub(super) fn leave(&self, rank: usize) {
        self.left[rank].store(true, Ordering::SeqCst);
        self.signals.iter().for_each(Signal::notify);
    }

    /// The ranks that have returned.
    pub(super) fn left(&self) -> Vec<usize> {
        (0..self.left.len()).filter(|&rank| self.left[rank].load(Ordering::SeqCst)).collect()
    }
}
