//! A rank's operations in progress, and waiting for one of them.
//!
//! While a rank waits for *any* operation it advances *all* of its operations, in
//! every group, as far as possible. Otherwise two ranks that wait for the same two
//! operations in opposite orders would deadlock.

use super::world::ThreadWorld;
use crate::comm::CommError;
use crate::comm::buffer::StorageId;
use crate::comm::diagnostics::{Entry, Wait};
use crate::comm::ordered_channel::OrderedChannel;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The timeout used when the clock cannot represent the requested one.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The state of one rank of a world, shared by all its groups.
#[derive(Debug)]
pub(super) struct RankState {
    pub(super) global_rank: usize,
    pub(super) world: Arc<ThreadWorld>,
    engine: Mutex<ProgressEngine>,
    has_lane: AtomicBool,
}

#[derive(Debug, Default)]
struct ProgressEngine {
    next_id: u64,
    /// In issue order.
    in_flight: Vec<InFlight>,
}

#[derive(Debug)]
struct InFlight {
    id: u64,
    channel: OrderedChannel,
    operation: Box<dyn Operation>,
}

/// An operation in progress on one rank.
pub(super) trait Operation: Send + std::fmt::Debug {
    /// Advances as far as possible without waiting. `published` are the storages that this
    /// rank's other operations have published for peers to read.
    fn advance(&mut self, published: &[StorageId]) -> Result<Step, CommError>;

    /// Moves the data of an exchange or message on the CPU if all its ranks have posted it, and completes nothing. Returns whether
    /// later operations of the channel may do so.
    fn pull_exchange(&mut self, _published: &[StorageId]) -> Result<bool, CommError> {
        Ok(false)
    }

    /// The storages that peers may read.
    fn published(&self) -> &[StorageId];

    /// The wait of this operation, for hang reports.
    fn wait(&self) -> Wait;

    /// The flight recorder's entry for this operation, with number `id`.
    fn entry(&self, id: u64) -> Entry;
}

/// Progress of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// This rank has not moved its data yet: later operations of the channel wait.
    Blocked,
    /// This rank has moved its data; peers have yet to read this rank's data.
    WaitingForPeers,
    /// The operation is complete.
    Complete,
}

impl RankState {
    pub(super) fn new(global_rank: usize, world: Arc<ThreadWorld>) -> Self {
        Self { global_rank, world, engine: Mutex::default(), has_lane: AtomicBool::new(false) }
    }

    /// Queues an operation that `issue` publishes. No other operation of this rank is issued
    /// meanwhile, so the queue is in order of sequence numbers.
    pub(super) fn issue(&self, channel: OrderedChannel, issue: impl FnOnce() -> Box<dyn Operation>) -> u64 {
        let mut engine = self.engine.lock();
        let id = engine.next_id;
        engine.next_id += 1;
        let operation = issue();
        self.world.record(self.global_rank, operation.entry(id));
        engine.in_flight.push(InFlight { id, channel, operation });
        id
    }

    /// Blocks until operation `id` is complete.
    ///
    /// # Errors
    /// The failure of the world, which this call may be the first to notice.
    pub(super) fn complete(&self, id: u64) -> Result<(), CommError> {
        let signal = self.world.signal(self.global_rank);
        let mut has_slept = false;
        let started = Instant::now();
        let deadline = started.checked_add(self.world.timeout()).unwrap_or(started + FOREVER);
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
    pub(super) fn is_complete(&self, id: u64) -> bool {
        !matches!(self.poll(id), Ok(Some(_)))
    }

    /// Advances all operations. Returns what operation `id` waits for; `None` when it is complete.
    fn poll(&self, id: u64) -> Result<Option<Wait>, CommError> {
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
        let rank = self.global_rank;
        let error = match error {
            // Other ranks need to know whose tensor it was.
            CommError::Tensor(reason) => CommError::PeerFailed { rank, reason },
            named => named,
        };
        self.world.fail(rank, error)
    }

    /// Advances every operation. Returns `None` when `id` is complete.
    fn advance_all(&self, id: u64) -> Result<Option<Wait>, CommError> {
        let mut engine = self.engine.lock();
        if !engine.in_flight.iter().any(|operation| operation.id == id) {
            return Ok(None);
        }
        self.world.check()?;
        engine.advance(|id| self.world.complete(self.global_rank, id))?;
        let Some(waiting) = engine.in_flight.iter().find(|operation| operation.id == id) else {
            return Ok(None);
        };
        // An earlier operation of the channel may block this one.
        let head =
            engine.in_flight.iter().find(|operation| operation.channel == waiting.channel).unwrap_or(waiting);
        Ok(Some(head.operation.wait()))
    }
}

impl ProgressEngine {
    fn advance(&mut self, complete: impl Fn(u64)) -> Result<(), CommError> {
        let mut blocked: Vec<OrderedChannel> = Vec::new();
        let mut index = 0;
        while index < self.in_flight.len() {
            let channel = self.in_flight[index].channel;
            let step = if blocked.contains(&channel) {
                Step::Blocked
            } else {
                let published = self.published_by_others(index);
                self.in_flight[index].operation.advance(&published)?
            };
            match step {
                Step::Blocked => blocked.push(channel),
                Step::WaitingForPeers => {}
                Step::Complete => {
                    complete(self.in_flight.remove(index).id);
                    continue;
                }
            }
            index += 1;
        }
        Ok(())
    }

    fn pull_exchanges(&mut self) -> Result<(), CommError> {
        let mut blocked: Vec<OrderedChannel> = Vec::new();
        for index in 0..self.in_flight.len() {
            let channel = self.in_flight[index].channel;
            if blocked.contains(&channel) {
                continue;
            }
            let published = self.published_by_others(index);
            if !self.in_flight[index].operation.pull_exchange(&published)? {
                blocked.push(channel);
            }
        }
        Ok(())
    }

    fn published_by_others(&self, index: usize) -> Vec<StorageId> {
        let others = self.in_flight.iter().enumerate().filter(|&(other, _)| other != index);
        others.flat_map(|(_, other)| other.operation.published()).copied().collect()
    }
}
