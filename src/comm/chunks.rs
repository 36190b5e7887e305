//! How an all_reduce divides its elements among the ranks, shared by the backends.

use std::ops::Range;

/// Up to here every rank of an all_reduce reduces all elements itself; above, each
/// reduces its chunk and collects those of the others.
pub(super) const DIRECT_REDUCE_MAX_ELEMS: usize = 4096;

/// Chunks begin at multiples of this, where 16-byte accesses are aligned if those of
/// the whole tensor are.
const CHUNK_ALIGN_ELEMS: usize = 8;

/// The part of `count` elements that a rank of `ranks` reduces in an all_reduce.
pub(super) fn chunk_of(ranks: usize, rank: usize, count: usize) -> Range<usize> {
    let begin = |rank| {
        if rank == ranks { count } else { rank * count / ranks / CHUNK_ALIGN_ELEMS * CHUNK_ALIGN_ELEMS }
    };
    begin(rank)..begin(rank + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_follow_one_another_and_cover_everything() {
        for (ranks, count) in [(1, 5), (3, 4097), (4, 12_000), (7, 10_001)] {
            let chunks: Vec<_> = (0..ranks).map(|rank| chunk_of(ranks, rank, count)).collect();
            assert_eq!((chunks[0].start, chunks[ranks - 1].end), (0, count));
            assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start), "{chunks:?}");
        }
    }
}
