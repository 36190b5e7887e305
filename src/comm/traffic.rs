//! Element counts that collectives move between each pair of ranks: plain integers.
//!
//! The thread backend splits its reductions by these rules and counts what it moves; the
//! `fake` backend, which moves no data, uses them too.

use super::StridedPlan;
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

impl Traffic {
    /// Builds the traffic of `rank` from the counts for each peer.
    fn between(
        ranks: usize,
        rank: usize,
        sent: impl Fn(usize) -> usize,
        received: impl Fn(usize) -> usize,
    ) -> Self {
        let to_peers = |elements: &dyn Fn(usize) -> usize| {
            (0..ranks).map(|peer| if peer == rank { 0 } else { elements(peer) as u64 }).collect()
        };
        Self { sent: to_peers(&sent), received: to_peers(&received) }
    }

    /// All-gather of `count` elements per rank.
    pub fn all_gather(ranks: usize, rank: usize, count: usize) -> Self {
        Self::between(ranks, rank, |_| count, |_| count)
    }

    /// Reduce-scatter with `chunk` elements per rank.
    pub fn reduce_scatter(ranks: usize, rank: usize, chunk: usize) -> Self {
        Self::between(ranks, rank, |_| chunk, |_| chunk)
    }

    /// All-reduce of `count` elements: directly if they are few, else in chunks, where each rank
    /// reduces one chunk and collects the others.
    pub fn all_reduce(ranks: usize, rank: usize, count: usize) -> Self {
        if count <= DIRECT_REDUCE_MAX_ELEMS {
            return Self::all_gather(ranks, rank, count);
        }
        let own = all_reduce_chunk(ranks, rank, count).len();
        let both = |peer| own + all_reduce_chunk(ranks, peer, count).len();
        Self::between(ranks, rank, both, both)
    }

    /// All-to-all with the given counts.
    pub fn all_to_all(rank: usize, send_counts: &[usize], recv_counts: &[usize]) -> Self {
        Self::between(send_counts.len(), rank, |peer| send_counts[peer], |peer| recv_counts[peer])
    }

    /// Strided all-to-all of a plan.
    pub fn strided(rank: usize, plan: &StridedPlan) -> Self {
        let (send_counts, recv_counts) = plan.counts();
        Self::all_to_all(rank, &send_counts, &recv_counts)
    }

    /// Broadcast of `count` elements from `root`.
    pub fn broadcast(ranks: usize, rank: usize, root: usize, count: usize) -> Self {
        let if_root = |is_root: bool| if is_root { count } else { 0 };
        Self::between(ranks, rank, |_| if_root(rank == root), |peer| if_root(peer == root))
    }

    /// Reduce of `count` elements to `root`: as an all-reduce, but only the root collects results.
    pub fn reduce(ranks: usize, rank: usize, root: usize, count: usize) -> Self {
        let (to_root, at_root) = (|peer: usize| peer == root, rank == root);
        if count <= DIRECT_REDUCE_MAX_ELEMS {
            let (sent, received) =
                (|peer| if to_root(peer) { count } else { 0 }, if at_root { count } else { 0 });
            return Self::between(ranks, rank, sent, |_| received);
        }
        let chunk = |rank| all_reduce_chunk(ranks, rank, count).len();
        let own = chunk(rank);
        Self::between(
            ranks,
            rank,
            |peer| chunk(peer) + if to_root(peer) { own } else { 0 },
            |peer| own + if at_root { chunk(peer) } else { 0 },
        )
    }

    /// Message of `count` elements from `src` to `dst`, on one of the two.
    pub fn message(ranks: usize, rank: usize, (src, dst): (usize, usize), count: usize) -> Self {
        let is = |from, to| if (from, to) == (src, dst) { count } else { 0 };
        Self::between(ranks, rank, |peer| is(rank, peer), |peer| is(peer, rank))
    }

    /// Returns the elements sent to all members.
    pub fn total_sent(&self) -> u64 {
        self.sent.iter().sum()
    }

    /// Returns the elements received from all members.
    pub fn total_received(&self) -> u64 {
        self.received.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        for count in [7, 4096, 4097, 100_003] {
            let all: Vec<_> = (0..5).map(|rank| Traffic::all_reduce(5, rank, count)).collect();
            for (from, to) in (0..5).flat_map(|from| (0..5).map(move |to| (from, to))) {
                assert_eq!(all[from].sent[to], all[to].received[from]);
            }
            assert!((0..5).all(|rank| all[rank].sent[rank] == 0));
            let all: Vec<_> = (0..5).map(|rank| Traffic::reduce(5, rank, 3, count)).collect();
            for (from, to) in (0..5).flat_map(|from| (0..5).map(move |to| (from, to))) {
                assert_eq!(all[from].sent[to], all[to].received[from]);
            }
        }
    }

    #[test]
    fn a_chunked_reduction_sends_what_a_ring_would() {
        // 2 (P − 1)/P of the elements, in any order.
        let all = (0..4).map(|rank| Traffic::all_reduce(4, rank, 64_000));
        assert!(all.into_iter().all(|traffic| traffic.total_sent() == 2 * 64_000 * 3 / 4));
    }
}
