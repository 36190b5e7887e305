//! The split of a length over the ranks of an axis.

use std::ops::Range;

/// Returns the contiguous range of `len` items that belongs to rank `rank` of `size`.
///
/// The first `len % size` ranks get one item more. The range is empty if `rank >= size`. Both tokens and
/// attention heads are split over sp this way.
///
/// ```
/// use ulysses::mesh::shard_range;
/// assert_eq!([0, 1, 2].map(|rank| shard_range(64, 3, rank)), [0..22, 22..43, 43..64]);
/// ```
pub fn shard_range(len: usize, size: usize, rank: usize) -> Range<usize> {
    if rank >= size {
        return len..len;
    }
    let (quotient, remainder) = (len / size, len % size);
    let start = |rank: usize| rank * quotient + rank.min(remainder);
    start(rank)..start(rank + 1)
}
