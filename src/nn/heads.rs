//! Heads in groups that share a head of another kind, and how they are divided: over the ranks of tp, then over those of sp, in chunks.

use super::{LayerError, TensorRank};
use crate::mesh::shard_range;
use std::ops::Range;
use ulysses_kernels::attention::grouped_heads;

/// Something of query heads and of KV heads.
///
/// Equally many neighboring query heads share a KV head. So do value heads a key head in linear attention. The channels of a
/// convolution are heads of one element that share none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Heads<T> {
    /// Of the query heads; in linear attention of the value heads.
    pub q: T,
    /// Of the KV heads; in linear attention of the key heads.
    pub kv: T,
}

/// The numbers of heads; that of KV heads is a divisor of the other.
pub type NumHeads = Heads<usize>;

/// Neighboring heads, those of a chunk or of a rank, and the KV heads that they use.
pub type HeadRanges = Heads<Range<usize>>;

/// The heads of every rank. Ranks may share a KV head.
pub type HeadDivision = Heads<Vec<Range<usize>>>;

impl NumHeads {
    /// Heads that share none.
    pub fn ungrouped(num_heads: usize) -> Self {
        Self { q: num_heads, kv: num_heads }
    }

    fn group(self) -> usize {
        self.q / self.kv.max(1)
    }

    /// The KV head of each query head.
    pub fn q_to_kv(self) -> Vec<usize> {
        grouped_heads(self.q, self.kv)
    }

    /// Splits heads into `chunks` parts of whole KV heads with their query heads, as evenly as possible. If there are more parts than
    /// KV heads, the others are empty.
    pub fn chunks(self, chunks: usize) -> Vec<HeadRanges> {
        let bound = |index| index * self.kv / chunks;
        let chunk = |index| {
            let kv = bound(index)..bound(index + 1);
            HeadRanges { q: scaled_range(&kv, self.group()), kv }
        };
        (0..chunks).map(chunk).collect()
    }

    /// Divides heads over `size` ranks of tp: whole KV heads with their query heads or, if there are fewer KV heads, the query heads of
    /// each KV head over some ranks. `None` if a rank would have no head.
    pub fn over_tp(self, size: usize) -> Option<HeadDivision> {
        if size <= self.kv {
            let kv: Vec<_> = (0..size).map(|rank| shard_range(self.kv, size, rank)).collect();
            return Some(HeadDivision { q: scaled(&kv, self.group()), kv });
        }
        let (group, mut division) = (self.group(), HeadDivision { q: Vec::new(), kv: Vec::new() });
        for head in 0..self.kv {
            let ranks = shard_range(size, self.kv, head).len();
            if ranks > group {
                return None;
            }
            division.q.extend((0..ranks).map(|rank| {
                let own = shard_range(group, ranks, rank);
                head * group + own.start..head * group + own.end
            }));
            division.kv.extend(std::iter::repeat_n(head..head + 1, ranks));
        }
        Some(division)
    }

    /// As [`over_tp`](Self::over_tp), for the layer called `layer`.
    ///
    /// # Errors
    /// A rank that would have no head.
    pub(super) fn divide(
        self,
        layer: &str,
        TensorRank { size, .. }: TensorRank,
    ) -> Result<HeadDivision, LayerError> {
        self.over_tp(size).ok_or_else(|| {
            let max_size = (1..=self.q).rev().find(|size| self.over_tp(*size).is_some()).unwrap_or(1);
            LayerError::TensorRanks { layer: layer.to_owned(), size, max_size }
        })
    }

    /// Divides heads over `size` ranks of sp: query heads as evenly as possible, the first ranks with one more, each with the KV heads that
    /// they use. Ranks beyond the query heads have none.
    pub fn over_sp(self, size: usize) -> HeadDivision {
        let ranks = (0..size).map(|rank| self.on_sp_rank(size, rank));
        let (q, kv) = ranks.map(|HeadRanges { q, kv }| (q, kv)).unzip();
        HeadDivision { q, kv }
    }

    /// The heads of one rank of [`over_sp`](Self::over_sp).
    pub fn on_sp_rank(self, size: usize, rank: usize) -> HeadRanges {
        let q = shard_range(self.q, size, rank);
        let kv = match q.is_empty() {
            true => self.kv..self.kv,
            false => q.start / self.group()..(q.end - 1) / self.group() + 1,
        };
        HeadRanges { q, kv }
    }
}

impl HeadRanges {
    /// Their numbers.
    pub fn num_heads(&self) -> NumHeads {
        NumHeads { q: self.q.len(), kv: self.kv.len() }
    }

    /// The place of each query head's KV head among these, of all `heads`.
    pub fn q_to_kv(&self, heads: NumHeads) -> Vec<usize> {
        self.q.clone().map(|q| q / heads.group() - self.kv.start).collect()
    }
}

impl HeadDivision {
    /// The number of heads of one rank.
    pub(super) fn num_heads(&self, rank: usize) -> NumHeads {
        NumHeads { q: self.q[rank].len(), kv: self.kv[rank].len() }
    }
}

/// Ranges of groups of `factor` items each, as ranges of items.
pub(super) fn scaled(ranges: &[Range<usize>], factor: usize) -> Vec<Range<usize>> {
    ranges.iter().map(|range| scaled_range(range, factor)).collect()
}

/// Divides `count` items, of which ranks share none, over the ranks of tp as evenly as possible.
///
/// # Errors
/// More ranks than items; `layer` is the name for the error.
pub(super) fn even_ranges(
    layer: &str,
    count: usize,
    tp: TensorRank,
) -> Result<Vec<Range<usize>>, LayerError> {
    Ok(NumHeads::ungrouped(count).divide(layer, tp)?.q)
}

/// One range for each rank, as lists of ranges.
pub(super) fn one_each(ranks: &[Range<usize>]) -> Vec<Vec<Range<usize>>> {
    ranks.iter().map(|own| vec![own.clone()]).collect()
}

fn scaled_range(range: &Range<usize>, factor: usize) -> Range<usize> {
    range.start * factor..range.end * factor
}
