//! Strided blocks of elements within a tensor. Pure integers.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A block of elements within one contiguous tensor: `batch × rows` runs of `run` adjacent elements.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StridedBlock {
    /// Index of the block's tensor among the call's tensors.
    pub tensor: usize,
    /// First element of the block.
    pub offset: usize,
    /// Number of batches.
    pub batch: usize,
    /// Distance between batches, in elements.
    pub batch_stride: usize,
    /// Runs per batch.
    pub rows: usize,
    /// Distance between runs, in elements.
    pub row_stride: usize,
    /// Contiguous elements per run.
    pub run: usize,
}

impl StridedBlock {
    /// A block of adjacent elements.
    pub fn contiguous(tensor: usize, offset: usize, elements: usize) -> Self {
        Self { tensor, offset, batch: 1, batch_stride: 0, rows: 1, row_stride: 0, run: elements }
    }

    /// A block of adjacent elements of tensor 0, in the shape of `self`.
    #[must_use]
    pub fn packed_at(&self, offset: usize) -> Self {
        let (rows, run) = (self.rows, self.run);
        Self { tensor: 0, offset, batch_stride: rows * run, row_stride: run, ..self.clone() }
    }

    /// `batch`, `rows` and `run`, in which source and target of a copy must agree.
    pub fn shape(&self) -> (usize, usize, usize) {
        (self.batch, self.rows, self.run)
    }

    /// Number of elements, `None` on overflow.
    pub fn elements(&self) -> Option<usize> {
        self.batch.checked_mul(self.rows)?.checked_mul(self.run)
    }

    /// One past the last element, `None` on overflow. An empty block ends at 0, for any offset.
    pub fn end(&self) -> Option<usize> {
        if self.elements()? == 0 {
            return Some(0);
        }
        let batches = (self.batch - 1).checked_mul(self.batch_stride)?;
        let rows = (self.rows - 1).checked_mul(self.row_stride)?;
        self.offset.checked_add(batches)?.checked_add(rows)?.checked_add(self.run)
    }

    /// The range of its elements, if they are adjacent and in order.
    pub fn in_one_piece(&self) -> Option<Range<usize>> {
        let batch = self.rows.checked_mul(self.run)?;
        let rows_follow = self.rows <= 1 || self.row_stride == self.run;
        let batches_follow = self.batch <= 1 || self.batch_stride == batch;
        let end = self.offset.checked_add(self.elements()?)?;
        (rows_follow && batches_follow).then_some(self.offset..end)
    }

    /// The problem, if any, with a block of one of several tensors with these element counts. `what` names
    /// the tensors.
    pub fn fault(&self, tensor_elems: &[usize], what: &str) -> Option<String> {
        let Some(&elems) = tensor_elems.get(self.tensor) else {
            return Some(format!("names tensor {} of {} {what}", self.tensor, tensor_elems.len()));
        };
        match self.end() {
            Some(end) if end <= elems => None,
            Some(end) => Some(format!("ends at element {end} of {elems}")),
            None => Some("overflows".to_owned()),
        }
    }

    /// Returns whether two of its runs share elements, so that it cannot be written to. Assumes that
    /// [`end`](Self::end) does not overflow.
    pub fn overlaps_itself(&self) -> bool {
        if self.elements() == Some(0) {
            return false;
        }
        let rows_overlap = self.rows > 1 && self.row_stride < self.run;
        let batches_overlap = self.batch > 1 && self.batch_stride < self.run;
        let rows_span = (self.rows - 1) * self.row_stride + self.run;
        let batches_span = (self.batch - 1) * self.batch_stride + self.run;
        let interleaved = self.batch > 1
            && self.rows > 1
            && self.batch_stride < rows_span
            && self.row_stride < batches_span;
        rows_overlap || batches_overlap || interleaved
    }

    /// Returns whether two blocks within their tensors may share elements. `false` is always right; `true` may be
    /// wrong, but not for the blocks of an exchange, which are ranges of tokens or of heads of one tensor.
    pub fn may_overlap(&self, other: &Self) -> bool {
        let bounds = |block: &Self| (block.offset, block.end().unwrap_or(usize::MAX));
        let ((begin, end), (other_begin, other_end)) = (bounds(self), bounds(other));
        if self.tensor != other.tensor || end <= other_begin || other_end <= begin {
            return false;
        }
        let common = |stride: usize, other: usize| (stride == other).then_some(stride);
        let batches = common(self.batch_stride, other.batch_stride);
        let rows = common(self.row_stride, other.row_stride);
        let span = |block: &Self| (block.rows - 1) * block.row_stride + block.run;
        if batches.is_some_and(|stride| are_apart_modulo(stride, self, span(self), other, span(other))) {
            return false;
        }
        // Batch strides must not shift the columns.
        let keeps_columns = |stride: usize| {
            [self, other].iter().all(|b| b.batch == 1 || b.batch_stride.is_multiple_of(stride))
        };
        let rows = rows.filter(|&stride| stride > 0 && keeps_columns(stride));
        !rows.is_some_and(|stride| are_apart_modulo(stride, self, self.run, other, other.run))
    }
}

impl StridedBlock {
    /// Returns whether two blocks within their tensors share elements. Checks runs only if
    /// [`may_overlap`](Self::may_overlap) cannot exclude it.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.may_overlap(other) && self.runs().any(|begin| other.meets(begin..begin + self.run))
    }

    /// Offsets of the runs, batch by batch.
    pub fn runs(&self) -> impl Iterator<Item = usize> {
        let in_batch = move |batch: usize| (0..self.rows).map(move |row| batch + row * self.row_stride);
        (0..self.batch).map(|batch| self.offset + batch * self.batch_stride).flat_map(in_batch)
    }

    /// Returns whether a run has elements in a non-empty range.
    fn meets(&self, range: Range<usize>) -> bool {
        (0..self.batch).any(|batch| {
            let begin = self.offset + batch * self.batch_stride;
            // The last run that begins before the end of the range: if it does not reach into the range, none
            // does.
            let Some(before) = range.end.checked_sub(begin + 1) else { return false };
            let row = before.checked_div(self.row_stride).unwrap_or(0).min(self.rows - 1);
            begin + row * self.row_stride + self.run > range.start
        })
    }
}

/// Returns whether `span` elements from this block's offset on and `other_span` elements from the other's are
/// disjoint modulo `stride`.
fn are_apart_modulo(
    stride: usize,
    block: &StridedBlock,
    span: usize,
    other: &StridedBlock,
    other_span: usize,
) -> bool {
    if stride == 0 {
        return false;
    }
    let (begin, other_begin) = (block.offset % stride, other.offset % stride);
    let (end, other_end) = (begin + span, other_begin + other_span);
    end <= stride && other_end <= stride && (end <= other_begin || other_end <= begin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn block(offset: usize, batch: (usize, usize), rows: (usize, usize), run: usize) -> StridedBlock {
        let ((batch, batch_stride), (rows, row_stride)) = (batch, rows);
        StridedBlock { tensor: 0, offset, batch, batch_stride, rows, row_stride, run }
    }

    #[test]
    fn empty_blocks_end_at_zero_wherever_they_claim_to_lie() {
        let empty = block(1_000, (3, 5), (0, 9), 4);
        assert_eq!(empty.end(), Some(0));
        assert!(!empty.overlaps_itself());
    }

    #[test]
    fn overlap_is_distinguished_from_interleaving() {
        assert!(block(0, (1, 0), (2, 3), 4).overlaps_itself());
        assert!(block(0, (2, 5), (2, 4), 4).overlaps_itself());
        assert!(!block(0, (2, 4), (3, 8), 4).overlaps_itself(), "batches between the rows");
        assert!(!block(0, (2, 12), (3, 4), 4).overlaps_itself());
        assert!(block(usize::MAX, (2, 4), (2, 4), 4).end().is_none());
    }

    #[test]
    fn contiguous_blocks_are_told_from_those_with_gaps() {
        assert_eq!(block(3, (2, 12), (4, 3), 3).in_one_piece(), Some(3..27));
        assert_eq!(block(3, (1, 99), (4, 3), 3).in_one_piece(), Some(3..15));
        assert_eq!(block(3, (1, 0), (1, 99), 3).in_one_piece(), Some(3..6));
        assert_eq!(block(0, (2, 3), (1, 99), 3).in_one_piece(), Some(0..6));
        assert_eq!(block(3, (2, 13), (4, 3), 3).in_one_piece(), None, "a gap between batches");
        assert_eq!(block(3, (1, 0), (4, 5), 3).in_one_piece(), None, "gaps between runs");
        assert_eq!(block(usize::MAX, (1, 0), (1, 0), 3).in_one_piece(), None);
    }

    fn elements(block: &StridedBlock) -> HashSet<usize> {
        let runs = (0..block.batch).flat_map(|b| (0..block.rows).map(move |r| (b, r)));
        let begin = |(b, r)| block.offset + b * block.batch_stride + r * block.row_stride;
        runs.flat_map(|run| begin(run)..begin(run) + block.run).collect()
    }

    #[test]
    fn blocks_that_share_elements_are_detected() {
        let mut blocks = Vec::new();
        for offset in 0..9 {
            for (batch, rows) in [((1, 0), (1, 0)), ((1, 0), (3, 4)), ((2, 12), (2, 4)), ((2, 9), (3, 3))] {
                blocks.extend([1, 3].map(|run| block(offset, batch, rows, run)));
            }
        }
        let mut apart = 0;
        for a in &blocks {
            for b in &blocks {
                let is_shared = !elements(a).is_disjoint(&elements(b));
                assert!(a.may_overlap(b) || !is_shared, "{a:?} and {b:?}");
                assert_eq!(a.overlaps(b), is_shared, "{a:?} and {b:?}");
                apart += usize::from(!a.may_overlap(b));
            }
        }
        assert!(apart > blocks.len(), "found {apart} pairs apart");
    }

    #[test]
    fn token_ranges_and_head_ranges_of_one_tensor_are_apart() {
        // [2, 10, 6]: tokens 0..4 and 4..10 of all heads, then heads 0..2 and 2..6 of all tokens.
        let tokens = [block(0, (2, 60), (4, 6), 6), block(24, (2, 60), (6, 6), 6)];
        assert!(!tokens[0].may_overlap(&tokens[1]) && !tokens[1].may_overlap(&tokens[0]));
        let heads = [block(0, (2, 60), (10, 6), 2), block(2, (2, 60), (10, 6), 4)];
        assert!(!heads[0].may_overlap(&heads[1]) && !heads[1].may_overlap(&heads[0]));
        assert!(tokens[0].may_overlap(&heads[0]) && heads[1].may_overlap(&heads[1]));
        let empty = block(3, (2, 60), (0, 6), 6);
        assert!(!tokens[0].overlaps(&empty) && !empty.overlaps(&tokens[0]));
    }
}
