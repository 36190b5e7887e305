//! The state of a rank, and waiting for one of its operations.

use super::world::ThreadWorld;
use crate::comm::diagnostics::Wait;
use crate::comm::ordered_channel::OrderedChannel;
use crate::comm::progress_engine::{Operation, OperationId, ProgressEngine, deadline};
use crate::comm::{CallSignature, CommError};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The state of one rank of a world, shared by all its groups.
#[derive(Debug)]
pub(super) struct RankState {
    pub(super) global_rank: usize,
    pub(super) world: Arc<ThreadWorld>,
    engine: Mutex<ProgressEngine>,
    has_lane: AtomicBool,
}

impl RankState {
    pub(super) fn new(global_rank: usize, world: Arc<ThreadWorld>) -> Self {
        Self { global_rank, world, engine: Mutex::default(), has_lane: AtomicBool::new(false) }
    }

    /// Queues an operation that `publish` publishes. No other operation of this rank is issued
    /// meanwhile, so the queue is in order of sequence numbers.
    pub(super) fn issue(
        &self,
        channel: OrderedChannel,
        call: CallSignature,
        publish: impl FnOnce() -> Box<dyn Operation>,
    ) -> OperationId {
        let mut engine = self.engine.lock();
        let operation = publish();
        let number = self.world.record(self.global_rank, operation.label().clone(), call);
        let id = OperationId { number, channel };
        engine.push(id, operation);
        id
    }

    /// Blocks until an operation is complete.
    ///
    /// # Errors
    /// The failure of the world, which this call may be the first to notice.
    pub(super) fn complete(&self, id: OperationId) -> Result<(), CommError> {
        let signal = self.world.signal(self.global_rank);
        let mut has_slept = false;
        let started = Instant::now();
        let deadline = deadline(started, self.world.timeout());
        loop {
            let seen = signal.epoch();
            let late = Instant::now() >= deadline;
            let Some(wait) = self.poll(id)? else { break };
            // A peer that joined at the last moment is no longer missing.
            if late && !wait.missing.is_empty() {
                return Err(self.time_out(wait, started.elapsed()));
            }
            signal.wait(seen, deadline, || {
                self.world.note_wait(self.global_rank, Some(wait));
                has_slept = true;
            });
        }
        if has_slept {
            self.world.note_wait(self.global_rank, None);
        }
        Ok(())
    }

    /// Advances all operations without waiting. Returns whether operation `id` is complete, or the world has failed.
    pub(super) fn is_complete(&self, id: OperationId) -> bool {
        !matches!(self.poll(id), Ok(Some(_)))
    }

    /// Advances all operations. Returns what operation `id` waits for; `None` when it is complete.
    fn poll(&self, id: OperationId) -> Result<Option<Wait>, CommError> {
        // Read before the peers' progress is checked, so that everything a rank published
        // before it left counts.
        let left = self.world.left();
        let Some(wait) = self.advance_all(id).map_err(|error| self.fail(error))? else { return Ok(None) };
        match wait.missing.iter().copied().find(|rank| left.contains(rank)) {
            Some(rank) => Err(self.fail(wait.left_by(rank))),
            None => Ok(Some(wait)),
        }
    }

    /// Returns whether the caller is the first that wants a thread to move the data of exchanges.
    pub(super) fn claim_lane(&self) -> bool {
        !self.has_lane.swap(true, Ordering::Relaxed)
    }

    /// Moves the data of all exchanges and messages that their ranks have posted.
    pub(super) fn pull_exchanges(&self) -> Result<(), CommError> {
        self.engine.lock().pull_exchanges()
    }

    /// Fails the world because a wait timed out.
    fn time_out(&self, wait: Wait, waited: Duration) -> CommError {
        let report = self.world.hang_report();
        let timeout = report.root_blocker(wait).timed_out(waited);
        // Other ranks may time out too; only one logs.
        if self.world.failure().is_none() {
            report.log(&timeout);
        }
        self.fail(timeout)
    }

    /// Fails the world. Returns the first error of the world.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        self.world.fail(self.global_rank, error.on_rank(self.global_rank))
    }

    /// Fails the world because this rank has failed.
    pub(super) fn abort(&self, reason: String) {
        self.fail(CommError::PeerFailed { rank: self.global_rank, reason });
    }

    /// Advances every operation. Returns `None` when `id` is complete.
    fn advance_all(&self, id: OperationId) -> Result<Option<Wait>, CommError> {
        let mut engine = self.engine.lock();
        if !engine.is_in_flight(id) {
            return Ok(None);
        }
        self.world.check()?;
        engine.advance(|number| self.world.complete(self.global_rank, number))?;
        if !engine.is_in_flight(id) {
            return Ok(None);
        }
        Ok(engine.head(id).map(Operation::wait))
    }
}
