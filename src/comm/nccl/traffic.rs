//! Bytes that an operation moves between one rank and the others.

use crate::comm::{CollectiveOp, GroupStats};

/// Bytes moved by one operation of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MovedBytes {
    pub(super) op: CollectiveOp,
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl MovedBytes {
    /// Reductions or gathers over a ring of `ranks`, counted as in NCCL's bandwidth figures: of `whole_bytes`, the bytes of
    /// all ranks together, each rank passes `(ranks − 1) / ranks` in either direction; twice that for an all_reduce.
    pub(super) fn ring(op: CollectiveOp, whole_bytes: usize, ranks: usize) -> Self {
        let passes = if op == CollectiveOp::AllReduce { 2 } else { 1 };
        let bytes = (passes * (ranks - 1) * whole_bytes / ranks) as u64;
        Self { op, sent: bytes, received: bytes }
    }

    /// The root's bytes, sent to every other rank.
    pub(super) fn broadcast(bytes: usize, is_root: bool, ranks: usize) -> Self {
        let (sent, received) = if is_root { (bytes * (ranks - 1), 0) } else { (0, bytes) };
        Self { op: CollectiveOp::Broadcast, sent: sent as u64, received: received as u64 }
    }

    /// Every rank's bytes, sent to the root.
    pub(super) fn reduce(bytes: usize, is_root: bool, ranks: usize) -> Self {
        let Self { sent, received, .. } = Self::broadcast(bytes, is_root, ranks);
        Self { op: CollectiveOp::Reduce, sent: received, received: sent }
    }

    /// All bytes except those that a rank keeps.
    pub(super) fn all_to_all(send: &[usize], recv: &[usize], rank: usize, element_bytes: usize) -> Self {
        let of_peers = |counts: &[usize]| {
            let peers = counts.iter().enumerate().filter(|&(peer, _)| peer != rank);
            (peers.map(|(_, count)| count).sum::<usize>() * element_bytes) as u64
        };
        Self { op: CollectiveOp::AllToAll, sent: of_peers(send), received: of_peers(recv) }
    }

    /// Adds the bytes to the counters. Groups of one rank count nothing.
    pub(super) fn count(self, stats: &mut GroupStats, ranks: usize) {
        if ranks > 1 {
            let counters = stats.ops.entry(self.op).or_default();
            counters.calls += 1;
            counters.bytes_sent += self.sent;
            counters.bytes_received += self.received;
        }
    }
}

/// Returns the offset of each rank's part, for counts in rank order.
pub(super) fn offsets(counts: &[usize]) -> Vec<usize> {
    let mut next = 0;
    let begin = |count: &usize| {
        next += count;
        next - count
    };
    counts.iter().map(begin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::OpStats;

    #[test]
    fn each_operation_counts_bytes_sent_and_received() {
        let ring = |op| MovedBytes::ring(op, 48_000, 4);
        assert_eq!(
            (ring(CollectiveOp::AllReduce).sent, ring(CollectiveOp::AllReduce).received),
            (72_000, 72_000)
        );
        assert_eq!(ring(CollectiveOp::ReduceScatter).sent, 36_000);
        assert_eq!(ring(CollectiveOp::AllGather).received, 36_000);
        let root = MovedBytes::broadcast(5, true, 3);
        let other = MovedBytes::broadcast(5, false, 3);
        assert_eq!([(root.sent, root.received), (other.sent, other.received)], [(10, 0), (0, 5)]);
        let (root, other) = (MovedBytes::reduce(5, true, 3), MovedBytes::reduce(5, false, 3));
        assert_eq!([(root.sent, root.received), (other.sent, other.received)], [(0, 10), (5, 0)]);
        let exchange = MovedBytes::all_to_all(&[7, 1, 2], &[7, 3, 0], 0, 8);
        assert_eq!((exchange.sent, exchange.received), (24, 24));
    }

    #[test]
    fn counters_add_up_and_a_group_of_one_counts_nothing() {
        let mut stats = GroupStats::default();
        (0..2).for_each(|_| MovedBytes::broadcast(5, true, 3).count(&mut stats, 3));
        let expected = OpStats { calls: 2, bytes_sent: 20, bytes_received: 0 };
        assert_eq!(stats.get(CollectiveOp::Broadcast), expected);
        MovedBytes::broadcast(5, true, 1).count(&mut stats, 1);
        assert_eq!(stats.total(), expected);
    }

    #[test]
    fn offsets_are_running_sums() {
        assert_eq!(offsets(&[3, 0, 5, 1]), [0, 3, 3, 8]);
    }
}
