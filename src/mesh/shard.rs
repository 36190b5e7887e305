//! How a length is cut over the ranks of an axis.

use std::ops::Range;

/// The contiguous part of `len` items that rank `rank` of `size` holds; the first `len % size` ranks hold one
/// more. A rank that does not exist holds none.
///
/// Tokens over sp and attention heads over sp are cut by this one rule.
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
