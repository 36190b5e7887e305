//! Traffic statistics of a rank in a group, by operation.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::AddAssign;

/// The operations of a [`ProcessGroup`](super::ProcessGroup), as named in messages
/// and statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum CollectiveOp {
    /// [`start_all_reduce`](super::ProcessGroup::start_all_reduce)
    AllReduce,
    /// [`start_reduce_scatter`](super::ProcessGroup::start_reduce_scatter)
    ReduceScatter,
    /// [`start_all_gather`](super::ProcessGroup::start_all_gather)
    AllGather,
    /// [`start_all_to_all`](super::ProcessGroup::start_all_to_all)
    AllToAll,
    /// [`start_all_to_all_strided`](super::ProcessGroup::start_all_to_all_strided)
    AllToAllStrided,
    /// [`start_broadcast`](super::ProcessGroup::start_broadcast)
    Broadcast,
    /// [`start_reduce`](super::ProcessGroup::start_reduce)
    Reduce,
    /// [`start_gather`](super::ProcessGroup::start_gather)
    Gather,
    /// [`start_scatter`](super::ProcessGroup::start_scatter)
    Scatter,
    /// [`start_send`](super::ProcessGroup::start_send)
    Send,
    /// [`start_recv`](super::ProcessGroup::start_recv)
    Recv,
    /// [`start_barrier`](super::ProcessGroup::start_barrier)
    Barrier,
    /// [`split`](super::ProcessGroup::split)
    Split,
}

impl CollectiveOp {
    /// Every operation, in the order of the enum.
    pub const ALL: [CollectiveOp; 13] = [
        CollectiveOp::AllReduce,
        CollectiveOp::ReduceScatter,
        CollectiveOp::AllGather,
        CollectiveOp::AllToAll,
        CollectiveOp::AllToAllStrided,
        CollectiveOp::Broadcast,
        CollectiveOp::Reduce,
        CollectiveOp::Gather,
        CollectiveOp::Scatter,
        CollectiveOp::Send,
        CollectiveOp::Recv,
        CollectiveOp::Barrier,
        CollectiveOp::Split,
    ];

    /// The operation's name in messages and statistics.
    pub fn name(self) -> &'static str {
        match self {
            CollectiveOp::AllReduce => "all_reduce",
            CollectiveOp::ReduceScatter => "reduce_scatter",
            CollectiveOp::AllGather => "all_gather",
            CollectiveOp::AllToAll => "all_to_all",
            CollectiveOp::AllToAllStrided => "all_to_all_strided",
            CollectiveOp::Broadcast => "broadcast",
            CollectiveOp::Reduce => "reduce",
            CollectiveOp::Gather => "gather",
            CollectiveOp::Scatter => "scatter",
            CollectiveOp::Send => "send",
            CollectiveOp::Recv => "recv",
            CollectiveOp::Barrier => "barrier",
            CollectiveOp::Split => "split",
        }
    }

    /// Returns whether this is a point-to-point operation.
    pub fn is_message(self) -> bool {
        matches!(self, CollectiveOp::Send | CollectiveOp::Recv)
    }
}

impl fmt::Display for CollectiveOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The traffic of one operation between this rank and others. Data that a rank
/// copies to itself is not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpStats {
    /// Number of times this rank issued the operation.
    pub calls: u64,
    /// Bytes that other ranks have read from this one; final once they have completed the
    /// operation too.
    pub bytes_sent: u64,
    /// Bytes that this rank has read from others.
    pub bytes_received: u64,
}

/// The traffic of one rank in one group. Groups of one rank count nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupStats {
    /// Operations that were issued at least once.
    pub ops: BTreeMap<CollectiveOp, OpStats>,
}

/// Counts the traffic of one rank in one group. Groups of one rank count nothing.
#[derive(Debug)]
pub(super) struct TrafficCounter {
    ops: [OpStats; CollectiveOp::ALL.len()],
    sent_to: Vec<u64>,
}

impl TrafficCounter {
    pub(super) fn new(ranks: usize) -> Self {
        Self { ops: Default::default(), sent_to: vec![0; ranks] }
    }

    /// Counts a call.
    pub(super) fn call(&mut self, op: CollectiveOp) {
        if self.sent_to.len() > 1 {
            self.ops[op as usize].calls += 1;
        }
    }

    /// Counts bytes sent to another rank of the group.
    pub(super) fn sent(&mut self, op: CollectiveOp, to: usize, bytes: u64) {
        self.ops[op as usize].bytes_sent += bytes;
        self.sent_to[to] += bytes;
    }

    /// Counts bytes received from other ranks.
    pub(super) fn received(&mut self, op: CollectiveOp, bytes: u64) {
        self.ops[op as usize].bytes_received += bytes;
    }

    /// Number of calls of all operations.
    pub(super) fn num_calls(&self) -> u64 {
        self.ops.iter().map(|op| op.calls).sum()
    }

    pub(super) fn stats(&self) -> GroupStats {
        let all = CollectiveOp::ALL.into_iter().zip(self.ops);
        GroupStats { ops: all.filter(|(_, stats)| *stats != OpStats::default()).collect() }
    }

    /// Bytes sent to each rank of the group.
    pub(super) fn sent_to(&self) -> Vec<u64> {
        self.sent_to.clone()
    }
}

impl AddAssign for OpStats {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.bytes_sent += other.bytes_sent;
        self.bytes_received += other.bytes_received;
    }
}

impl AddAssign<&Self> for GroupStats {
    fn add_assign(&mut self, other: &Self) {
        other.ops.iter().for_each(|(op, added)| self.add(*op, *added));
    }
}

impl GroupStats {
    /// Returns the counters of `op`, or zeros if it was never issued.
    pub fn get(&self, op: CollectiveOp) -> OpStats {
        self.ops.get(&op).copied().unwrap_or_default()
    }

    /// Returns the sum over all operations.
    pub fn total(&self) -> OpStats {
        let mut total = OpStats::default();
        self.ops.values().for_each(|op| total += *op);
        total
    }

    pub(super) fn add(&mut self, op: CollectiveOp, added: OpStats) {
        *self.ops.entry(op).or_default() += added;
    }
}
