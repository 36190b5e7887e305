//! Element counts that collectives move between each pair of ranks: plain integers.
//!
//! Threads and MPI split their reductions by these rules and count what they move. The `fake` backend, which moves no
//! data, and NCCL, whose paths are unknown, count by them.

use super::{CallSignature, ElementCounts, Elements, OpStats};
use candle_core::DType;
use std::ops::Range;

/// The largest all_reduce in which every rank reduces all elements itself. Above it, each rank
/// reduces one chunk and collects the other chunks.
pub const DIRECT_REDUCE_MAX_ELEMS: usize = 4096;

/// Alignment of chunk starts. Accesses of 16 bytes are aligned if the whole tensor
/// is.
const CHUNK_ALIGN_ELEMS: usize = 8;

/// Returns the range of `count` elements that a rank reduces in an all_reduce of `ranks` ranks.
pub fn all_reduce_chunk(ranks: usize, rank: usize, count: usize) -> Range<usize> {
    let begin = |rank| {
        if rank == ranks { count } else { rank * count / ranks / CHUNK_ALIGN_ELEMS * CHUNK_ALIGN_ELEMS }
    };
    begin(rank)..begin(rank + 1)
}

/// Elements that one rank sends and receives in a collective, by member of its group; 0 for itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    /// Elements to each member.
    pub sent: Vec<u64>,
    /// Elements from each member.
    pub received: Vec<u64>,
}

impl CallSignature {
    /// Returns whether a rank gets the result of a reduction: all ranks do, or only the root of a reduce.
    pub(super) fn is_target(&self, rank: usize) -> bool {
        !matches!(self, Self::Reduce { root, .. } if *root != rank)
    }

    /// Returns the elements that `rank` of a group of `ranks` sends to and receives from every rank, itself included, in
    /// a checked call.
    pub(super) fn counts(&self, rank: usize, ranks: usize) -> ElementCounts {
        let if_true = |is_moved: bool, count: usize| if is_moved { count } else { 0 };
        let chunk = |rank, count| all_reduce_chunk(ranks, rank, count).len();
        let moved = |from: usize, to: usize| match self {
            Self::AllReduce { elements: Elements { count, .. }, .. }
            | Self::Reduce { elements: Elements { count, .. }, .. } => match *count {
                // Directly if they are few, else in chunks: each rank reduces one, and sends it to the targets.
                count @ ..=DIRECT_REDUCE_MAX_ELEMS => if_true(self.is_target(to), count),
                count => chunk(to, count) + if_true(self.is_target(to), chunk(from, count)),
            },
            Self::AllGather { chunk } | Self::ReduceScatter { chunk, .. } => chunk.count,
            Self::Broadcast { elements, root } => if_true(from == *root, elements.count),
            Self::Gather { chunk, root } => if_true(to == *root, chunk.count),
            Self::Scatter { chunk, root } => if_true(from == *root, chunk.count),
            Self::Send { elements, dst } => if_true((from, to) == (rank, *dst), elements.count),
            Self::Recv { elements, src } => if_true((from, to) == (*src, rank), elements.count),
            _ => 0,
        };
        match self {
            Self::AllToAll { send, recv, .. } => ElementCounts { send: send.to_vec(), recv: recv.to_vec() },
            Self::AllToAllStrided { plan, .. } => plan.counts(),
            _ => ElementCounts {
                send: (0..ranks).map(|peer| moved(rank, peer)).collect(),
                recv: (0..ranks).map(|peer| moved(peer, rank)).collect(),
            },
        }
    }
}

impl Traffic {
    /// Returns the traffic of `rank` of a group of `ranks` in a call, by the algorithms of threads and MPI.
    pub fn new(call: &CallSignature, rank: usize, ranks: usize) -> Self {
        let ElementCounts { send, recv } = call.counts(rank, ranks);
        let to_peers = |counts: Vec<usize>| {
            let of_peer = |(peer, count)| if peer == rank { 0 } else { count as u64 };
            counts.into_iter().enumerate().map(of_peer).collect()
        };
        Self { sent: to_peers(send), received: to_peers(recv) }
    }

    /// Returns one call with the bytes of this traffic.
    pub fn stats(&self, dtype: DType) -> OpStats {
        let bytes = |elements: &[u64]| elements.iter().sum::<u64>() * dtype.size_in_bytes() as u64;
        OpStats { calls: 1, bytes_sent: bytes(&self.sent), bytes_received: bytes(&self.received) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::ReduceOp;

    fn reduction(count: usize, root: Option<usize>) -> CallSignature {
        let (op, elements) = (ReduceOp::Sum, Elements { dtype: DType::F32, count });
        match root {
            Some(root) => CallSignature::Reduce { op, elements, root },
            None => CallSignature::AllReduce { op, elements },
        }
    }

    #[test]
    fn chunks_cover_the_elements_and_begin_aligned() {
        for (ranks, count) in [(1, 5000), (3, 5000), (4, 4097), (7, 12_345)] {
            let chunks: Vec<_> = (0..ranks).map(|rank| all_reduce_chunk(ranks, rank, count)).collect();
            assert_eq!((chunks[0].start, chunks[ranks - 1].end), (0, count));
            assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(chunks.iter().all(|chunk| chunk.start % CHUNK_ALIGN_ELEMS == 0));
        }
    }

    #[test]
    fn what_one_rank_sends_to_another_the_other_receives() {
        for (count, root) in
            [7, 4096, 4097, 100_003].into_iter().flat_map(|count| [(count, None), (count, Some(3))])
        {
            let all: Vec<_> = (0..5).map(|rank| Traffic::new(&reduction(count, root), rank, 5)).collect();
            for (from, to) in (0..5).flat_map(|from| (0..5).map(move |to| (from, to))) {
                assert_eq!(all[from].sent[to], all[to].received[from]);
            }
            assert!((0..5).all(|rank| all[rank].sent[rank] == 0));
        }
    }

    #[test]
    fn a_chunked_reduction_sends_what_a_ring_would() {
        // 2 (P − 1)/P of the elements, in any order.
        let all = (0..4).map(|rank| Traffic::new(&reduction(64_000, None), rank, 4));
        assert!(all.into_iter().all(|traffic| traffic.sent.iter().sum::<u64>() == 2 * 64_000 * 3 / 4));
    }
}
