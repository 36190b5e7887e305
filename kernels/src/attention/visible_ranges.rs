//! The keys that each query sees, as one contiguous range.

use std::ops::Range;

/// The visible key range of each query of one sequence; both ends never decrease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisibleRanges {
    pub(super) start: Vec<u32>,
    pub(super) end: Vec<u32>,
}

impl VisibleRanges {
    /// Merges queries, keys and documents in O(queries + keys + documents).
    pub(super) fn new(
        q_positions: &[u32],
        kv_positions: &[u32],
        boundaries: &[u32],
        window: Option<usize>,
    ) -> Self {
        let (mut start, mut end) =
            (Vec::with_capacity(q_positions.len()), Vec::with_capacity(q_positions.len()));
        let (mut document, mut first, mut past) = (0, 0, 0);
        for &position in q_positions {
            while boundaries[document + 1] <= position {
                document += 1;
            }
            let reach = window.map_or(0, |window| (position as usize + 1).saturating_sub(window));
            let earliest = reach.max(boundaries[document] as usize);
            while first < kv_positions.len() && (kv_positions[first] as usize) < earliest {
                first += 1;
            }
            while past < kv_positions.len() && kv_positions[past] <= position {
                past += 1;
            }
            start.push(first as u32);
            end.push(past as u32);
        }
        Self { start, end }
    }

    /// Number of queries.
    pub fn len(&self) -> usize {
        self.start.len()
    }

    /// Returns whether there are no queries.
    pub fn is_empty(&self) -> bool {
        self.start.is_empty()
    }

    /// The visible key indices of a query.
    ///
    /// # Panics
    /// When there is no such query.
    pub fn of(&self, query: usize) -> Range<usize> {
        self.start[query] as usize..self.end[query] as usize
    }

    pub(super) fn num_pairs(&self) -> u64 {
        self.start.iter().zip(&self.end).map(|(start, end)| u64::from(end - start)).sum()
    }

    /// The keys that at least one of the queries may see; `queries` is not empty.
    pub(super) fn hull(&self, queries: &Range<usize>) -> Range<usize> {
        self.of(queries.start).start..self.of(queries.end - 1).end
    }

    /// The keys that all of the queries see; `start > end` if there are none. `queries` is not empty.
    pub(super) fn common(&self, queries: &Range<usize>) -> Range<usize> {
        self.of(queries.end - 1).start..self.of(queries.start).end
    }

    /// The queries that may see at least one of `keys`.
    pub(super) fn queries_of(&self, keys: &Range<usize>) -> Range<usize> {
        let first = self.end.partition_point(|&end| end as usize <= keys.start);
        let past = self.start.partition_point(|&start| (start as usize) < keys.end);
        first..past.max(first)
    }
}
