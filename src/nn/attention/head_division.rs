//! The heads of each rank of tp.

use super::{AttentionConfig, QkNorm};
use crate::mesh::shard_range;
use crate::nn::{LayerError, TensorRank};
use std::ops::Range;

/// The heads of every rank of tp.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadDivision {
    /// Query heads.
    pub q: Vec<Range<usize>>,
    /// The KV heads that they use. Ranks may share one.
    pub kv: Vec<Range<usize>>,
}

impl AttentionConfig {
    /// Divides the heads over `size` ranks: whole KV heads with their query heads or, if there are fewer KV heads, the query
    /// heads of each KV head over some ranks. `None` if a rank would have no head, or a norm spans them all.
    pub fn divide_heads(&self, size: usize) -> Option<HeadDivision> {
        let Self { num_heads, num_kv_heads, qk_norm, .. } = *self;
        if qk_norm == Some(QkNorm::AllHeads) {
            return None;
        }
        let group = num_heads / num_kv_heads;
        if size <= num_kv_heads {
            let kv: Vec<_> = (0..size).map(|rank| shard_range(num_kv_heads, size, rank)).collect();
            return Some(HeadDivision { q: scaled(&kv, group), kv });
        }
        let (mut q, mut kv) = (Vec::new(), Vec::new());
        for head in 0..num_kv_heads {
            let ranks = shard_range(size, num_kv_heads, head).len();
            if ranks > group {
                return None;
            }
            q.extend((0..ranks).map(|rank| {
                let own = shard_range(group, ranks, rank);
                head * group + own.start..head * group + own.end
            }));
            kv.extend(std::iter::repeat_n(head..head + 1, ranks));
        }
        Some(HeadDivision { q, kv })
    }

    /// The largest number of ranks of tp that can divide the heads.
    pub fn max_tensor_ranks(&self) -> usize {
        (1..=self.num_heads).rev().find(|size| self.divide_heads(*size).is_some()).unwrap_or(1)
    }

    /// The attention of one rank.
    ///
    /// # Errors
    /// Heads that cannot be divided over so many ranks; `layer` is the name for the error.
    pub fn divided(self, layer: &str, tp: TensorRank) -> Result<(Self, HeadDivision), LayerError> {
        let indivisible = || LayerError::TensorRanks {
            layer: layer.to_owned(),
            size: tp.size,
            max_size: self.max_tensor_ranks(),
        };
        let heads = self.divide_heads(tp.size).ok_or_else(indivisible)?;
        let (num_heads, num_kv_heads) = (heads.q[tp.rank].len(), heads.kv[tp.rank].len());
        Ok((Self { num_heads, num_kv_heads, ..self }, heads))
    }
}

/// Ranges of groups of `factor` items each, as ranges of items.
pub(super) fn scaled(ranges: &[Range<usize>], factor: usize) -> Vec<Range<usize>> {
    ranges.iter().map(|range| range.start * factor..range.end * factor).collect()
}
