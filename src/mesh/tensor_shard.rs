//! The part of a tensor that a rank has, if an axis divides a dimension by more than its length, such as by heads.

use std::ops::Range;
use std::sync::Arc;

/// One rank's part of a tensor, of which the ranks of an axis share a dimension: some of its indices, in ascending ranges.
/// Every index belongs to one rank.
///
/// ```
/// use ulysses::mesh::{ShardRun, TensorShard};
///
/// // Query, key and value rows of one matrix, [6 + 2 + 2, 3], over two ranks: each has some rows of all three.
/// let ranks = vec![vec![0..4, 6..7, 8..9], vec![4..6, 7..8, 9..10]];
/// let shard = TensorShard::new(0, 10, ranks, 1);
/// assert_eq!(shard.local_shape(&[10, 3]), [4, 3]);
/// assert_eq!(shard.whole_shape(&[4, 3]), [10, 3]);
/// // The local elements 4..12 are in three runs of the whole tensor.
/// let runs = [(4, 16, 2), (6, 21, 3), (9, 27, 3)].map(|(local, whole, len)| ShardRun { local, whole, len });
/// assert_eq!(shard.runs(&[4, 3], 4..12), runs);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorShard {
    /// The dimension.
    pub dim: usize,
    /// Its length in the whole tensor.
    pub len: usize,
    /// The indices of every rank.
    pub ranks: Arc<[Vec<Range<usize>>]>,
    /// The rank that this part belongs to.
    pub rank: usize,
}

/// Elements that are consecutive in a rank's part, and in the whole tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardRun {
    /// The first one, within the part.
    pub local: usize,
    /// The first one, within the whole tensor.
    pub whole: usize,
    /// How many.
    pub len: usize,
}

impl TensorShard {
    /// The part of `rank`, of a dimension of length `len` that the ranks divide so.
    pub fn new(dim: usize, len: usize, ranks: impl Into<Arc<[Vec<Range<usize>>]>>, rank: usize) -> Self {
        Self { dim, len, ranks: ranks.into(), rank }
    }

    /// The part of another rank.
    #[must_use]
    pub fn at(&self, rank: usize) -> Self {
        Self { rank, ..self.clone() }
    }

    /// Number of indices that this rank has.
    pub fn local_len(&self) -> usize {
        self.ranks[self.rank].iter().map(ExactSizeIterator::len).sum()
    }

    /// The shape of this part of a tensor.
    pub fn local_shape(&self, whole: &[usize]) -> Vec<usize> {
        with_len(whole, self.dim, self.local_len())
    }

    /// The shape of the whole tensor.
    pub fn whole_shape(&self, local: &[usize]) -> Vec<usize> {
        with_len(local, self.dim, self.len)
    }

    /// The elements `local` of this part, which has the shape `shape`, as runs of the whole tensor. All row-major.
    pub fn runs(&self, shape: &[usize], local: Range<usize>) -> Vec<ShardRun> {
        let inner: usize = shape[self.dim + 1..].iter().product();
        let (local_row, whole_row) = (self.local_len() * inner, self.len * inner);
        let mut runs = Vec::new();
        for outer in local.start / local_row.max(1)..local.end.div_ceil(local_row.max(1)) {
            let mut at = outer * local_row;
            for range in &self.ranks[self.rank] {
                let (start, end) = (at, at + range.len() * inner);
                let own = start.max(local.start)..end.min(local.end);
                if !own.is_empty() {
                    let whole = outer * whole_row + range.start * inner + (own.start - start);
                    runs.push(ShardRun { local: own.start, whole, len: own.len() });
                }
                at = end;
            }
        }
        runs
    }
}

fn with_len(shape: &[usize], dim: usize, len: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    shape[dim] = len;
    shape
}
