//! The heads of each rank of tp.

use super::AttentionConfig;
use crate::mesh::shard_range;
use crate::nn::{LayerError, TensorRank};
use std::ops::Range;

/// The heads of every rank of tp; of linear attention, value heads and the key heads that they use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadDivision {
    /// Query heads.
    pub q: Vec<Range<usize>>,
    /// The KV heads that they use. Ranks may share one.
    pub kv: Vec<Range<usize>>,
}

impl HeadDivision {
    /// Divides heads over `size` ranks: whole KV heads with their query heads or, if there are fewer KV heads, the query heads of
    /// each KV head over some ranks. `None` if a rank would have no head.
    pub fn new([num_heads, num_kv_heads]: [usize; 2], size: usize) -> Option<Self> {
        let group = num_heads / num_kv_heads;
        if size <= num_kv_heads {
            let kv: Vec<_> = (0..size).map(|rank| shard_range(num_kv_heads, size, rank)).collect();
            return Some(Self { q: scaled(&kv, group), kv });
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
        Some(Self { q, kv })
    }

    /// Divides the heads of a layer over the ranks of tp.
    ///
    /// # Errors
    /// Heads that cannot be divided over so many ranks; `layer` is the name for the error.
    pub(in crate::nn) fn of_layer(
        layer: &str,
        heads: [usize; 2],
        tp: TensorRank,
    ) -> Result<Self, LayerError> {
        let largest = || (1..=heads[0]).rev().find(|size| Self::new(heads, *size).is_some());
        Self::new(heads, tp.size).ok_or_else(|| LayerError::TensorRanks {
            layer: layer.to_owned(),
            size: tp.size,
            max_size: largest().unwrap_or(1),
        })
    }
}

impl AttentionConfig {
    /// The heads of each of `size` ranks; `None` if a rank would have none.
    pub fn divide_heads(&self, size: usize) -> Option<HeadDivision> {
        HeadDivision::new([self.num_heads, self.num_kv_heads], size)
    }

    /// The attention of one rank.
    ///
    /// # Errors
    /// Heads that cannot be divided over so many ranks; `layer` is the name for the error.
    pub fn divided(self, layer: &str, tp: TensorRank) -> Result<(Self, HeadDivision), LayerError> {
        let heads = HeadDivision::of_layer(layer, [self.num_heads, self.num_kv_heads], tp)?;
        let (num_heads, num_kv_heads) = (heads.q[tp.rank].len(), heads.kv[tp.rank].len());
        Ok((Self { num_heads, num_kv_heads, ..self }, heads))
    }
}

/// Ranges of groups of `factor` items each, as ranges of items.
pub(in crate::nn) fn scaled(ranges: &[Range<usize>], factor: usize) -> Vec<Range<usize>> {
    ranges.iter().map(|range| range.start * factor..range.end * factor).collect()
}
