//! A rank's operations in progress, where they need its help to progress.
//!
//! While a rank waits for *any* operation it advances *all* of its operations, in
//! every group, as far as possible. Otherwise two ranks that wait for the same two
//! operations in opposite orders would deadlock.

use super::CommError;
use super::buffer::StorageId;
use super::diagnostics::{OpLabel, Wait};
use super::ordered_channel::OrderedChannel;
use std::time::{Duration, Instant};

/// The timeout used when the clock cannot represent the requested one.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Returns the end of a timeout that begins at `started`.
pub(super) fn deadline(started: Instant, timeout: Duration) -> Instant {
    started.checked_add(timeout).unwrap_or(started + FOREVER)
}

/// The operations in progress, in issue order.
#[derive(Debug, Default)]
pub(super) struct ProgressEngine {
    in_flight: Vec<InFlight>,
}

#[derive(Debug)]
struct InFlight {
    id: OperationId,
    operation: Box<dyn Operation>,
}

/// An operation of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OperationId {
    /// Its number in the flight recorder.
    pub(super) number: u64,
    pub(super) channel: OrderedChannel,
}

/// The storages that the other operations of a rank have published for peers to read. They are looked up when an operation asks:
/// most polls advance nothing, and some backends publish nothing.
pub(super) struct Published<'a> {
    earlier: &'a [InFlight],
    later: &'a [InFlight],
}

impl Published<'_> {
    pub(super) fn contains(&self, storage: StorageId) -> bool {
        let mut others = self.earlier.iter().chain(self.later);
        others.any(|other| other.operation.published().contains(&storage))
    }
}

/// An operation in progress on one rank.
pub(super) trait Operation: Send + std::fmt::Debug {
    /// Its name in errors and reports.
    fn label(&self) -> &OpLabel;

    /// Advances as far as possible without waiting. `published` is of this rank's other operations.
    fn advance(&mut self, published: &Published<'_>) -> Result<Progress, CommError>;

    /// Moves the data of an exchange or message on the CPU if all its ranks have posted it, and completes nothing. Returns whether
    /// later operations of the channel may do so.
    fn pull_exchange(&mut self, _published: &Published<'_>) -> Result<bool, CommError> {
        Ok(false)
    }

    /// The storages that peers may read.
    fn published(&self) -> &[StorageId] {
        &[]
    }

    /// The global ranks that it waits for.
    fn missing(&self) -> Vec<usize>;

    /// The wait of this operation, for hang reports.
    fn wait(&self) -> Wait {
        Wait { label: self.label().clone(), missing: self.missing() }
    }
}

/// Progress of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// This rank has not moved its data yet: later operations of the channel wait.
    Blocked,
    /// Later operations of the channel need not wait. Peers have yet to read this rank's data, or to send theirs.
    WaitingForPeers,
    /// The operation is complete.
    Complete,
}

impl ProgressEngine {
    pub(super) fn push(&mut self, id: OperationId, operation: Box<dyn Operation>) {
        self.in_flight.push(InFlight { id, operation });
    }

    pub(super) fn is_in_flight(&self, id: OperationId) -> bool {
        self.in_flight.iter().any(|operation| operation.id == id)
    }

    /// The first operation in progress of a channel, up to operation `id`: an earlier one may block it.
    pub(super) fn head(&self, id: OperationId) -> Option<&dyn Operation> {
        let mut up_to = self.in_flight.iter().take_while(|other| other.id.number <= id.number);
        up_to.find(|other| other.id.channel == id.channel).map(|first| &*first.operation)
    }

    /// Advances every operation and removes the complete ones, whose numbers `complete` gets.
    pub(super) fn advance(&mut self, mut complete: impl FnMut(u64)) -> Result<(), CommError> {
        let mut blocked: Vec<OrderedChannel> = Vec::new();
        let mut index = 0;
        while index < self.in_flight.len() {
            let channel = self.in_flight[index].id.channel;
            let progress = if blocked.contains(&channel) {
                Progress::Blocked
            } else {
                let (operation, published) = self.split_at(index);
                operation.advance(&published)?
            };
            match progress {
                Progress::Blocked => blocked.push(channel),
                Progress::WaitingForPeers => {}
                Progress::Complete => {
                    complete(self.in_flight.remove(index).id.number);
                    continue;
                }
            }
            index += 1;
        }
        Ok(())
    }

    /// Moves the data of all exchanges and messages that their ranks have posted.
    pub(super) fn pull_exchanges(&mut self) -> Result<(), CommError> {
        let mut blocked: Vec<OrderedChannel> = Vec::new();
        for index in 0..self.in_flight.len() {
            let channel = self.in_flight[index].id.channel;
            if blocked.contains(&channel) {
                continue;
            }
            let (operation, published) = self.split_at(index);
            if !operation.pull_exchange(&published)? {
                blocked.push(channel);
            }
        }
        Ok(())
    }

    /// Returns an operation, and what the others have published.
    fn split_at(&mut self, index: usize) -> (&mut dyn Operation, Published<'_>) {
        let (rest, later) = self.in_flight.split_at_mut(index + 1);
        let (earlier, own) = rest.split_at_mut(index);
        (&mut *own[0].operation, Published { earlier, later })
    }
}

/// For MPI. After a failure, threads keep what peers may read, and they are woken.
#[cfg(feature = "mpi")]
impl ProgressEngine {
    /// Drops all operations. Returns their ids.
    pub(super) fn abandon(&mut self) -> Vec<OperationId> {
        self.in_flight.drain(..).map(|operation| operation.id).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }
}
