//! Ranges of tokens, and the grid of blocks that divides them.

use std::ops::Range;

/// A rectangle of (query, key) pairs that is computed as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rectangle {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

/// The blocks of a grid over `0..total` that overlap `range`.
///
/// Blocks are not clipped to `range`, so that all passes over a problem use the same ones.
pub(super) fn blocks(range: Range<usize>, total: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    let touched = if range.is_empty() { 0..0 } else { range.start / size..range.end.div_ceil(size) };
    touched.map(move |block| block * size..total.min((block + 1) * size))
}

/// The intersection of two ranges. If there is none, an empty range within `b`'s bounds.
pub(super) fn intersect(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.clamp(b.start, b.end);
    start..a.end.clamp(start, b.end)
}

/// `part`, relative to the start of `whole`.
pub(super) fn within(part: &Range<usize>, whole: &Range<usize>) -> Range<usize> {
    part.start - whole.start..part.end - whole.start
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_those_of_the_grid_that_the_range_touches() {
        assert_eq!(blocks(5..21, 22, 10).collect::<Vec<_>>(), [0..10, 10..20, 20..22]);
        assert_eq!(blocks(10..21, 22, 10).collect::<Vec<_>>(), [10..20, 20..22]);
        assert!(blocks(10..20, 22, 10).eq(std::iter::once(10..20)));
        assert_eq!(blocks(7..7, 22, 10).count(), 0);
    }
}
