//! Divides a problem so that matmuls are large, launches few and scratch bounded.

use crate::attention::{
    VisibleRanges,
    blocks::{Rectangle, blocks, intersect},
    dims::Dims,
};
use std::ops::Range;

/// Maximum number of keys per tile: `kMaxKeys` of `cuda/attention.cu`.
const MAX_KEYS: usize = 1024;

/// Tiles begin and end at multiples of this many tokens, for the tensor cores, or at the end of their block.
const ALIGNMENT: usize = 64;

/// Sizes that do not depend on the problem.
#[derive(Debug, Clone, Copy)]
pub(in crate::attention) struct Tiling {
    /// Packed rows of a tile over all its heads.
    pub(in crate::attention) rows: usize,
    /// Keys per tile, at most [`MAX_KEYS`].
    pub(in crate::attention) keys: usize,
    /// Maximum number of query heads that are computed together, in whole KV groups.
    pub(in crate::attention) heads: usize,
    /// Elements of the backward pass's sums for `dk` and `dv` together; at least one block of keys.
    pub(in crate::attention) sums: usize,
}

impl Tiling {
    /// 4 Mi scores: 24 MiB with their 16-bit probabilities, which stay in an H100's L2 cache.
    pub(in crate::attention) const FORWARD: Self = Self { rows: 4096, keys: MAX_KEYS, heads: 16, sums: 0 };

    /// 2 Mi scores and as many gradients, 24 MiB with their 16-bit copies, and 32 MiB of sums.
    pub(in crate::attention) const BACKWARD: Self =
        Self { rows: 2048, keys: MAX_KEYS, heads: 16, sums: 8 << 20 };
}

/// Adjacent KV heads with the same number of query heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::attention) struct HeadChunk {
    pub(in crate::attention) first_kv_head: usize,
    pub(in crate::attention) num_kv_heads: usize,
    /// Query heads per KV head.
    pub(in crate::attention) group: usize,
    /// Index of their first query head in `AttentionLayout::heads_by_kv_head_on`.
    pub(in crate::attention) first_head: usize,
}

impl HeadChunk {
    pub(super) fn num_heads(&self) -> usize {
        self.num_kv_heads * self.group
    }
}

impl Tiling {
    /// All KV heads in order, in chunks of at most `max_kv_heads`.
    pub(in crate::attention) fn head_chunks(
        &self,
        q_to_kv: &[usize],
        dims: &Dims,
        max_kv_heads: usize,
    ) -> Vec<HeadChunk> {
        let mut groups = vec![0; dims.num_kv_heads];
        for kv_head in q_to_kv {
            groups[*kv_head] += 1;
        }
        let mut chunks: Vec<HeadChunk> = Vec::new();
        let mut first_head = 0;
        for (kv_head, group) in groups.into_iter().enumerate() {
            match chunks.last_mut() {
                Some(chunk)
                    if chunk.group == group
                        && chunk.num_kv_heads < max_kv_heads
                        && chunk.num_heads() + group <= self.heads =>
                {
                    chunk.num_kv_heads += 1;
                }
                _ => chunks.push(HeadChunk { first_kv_head: kv_head, num_kv_heads: 1, group, first_head }),
            }
            first_head += group;
        }
        chunks
    }

    /// Number of KV heads per chunk for which the sums of all keys fit; at least one.
    pub(super) fn max_kv_heads(&self, dims: &Dims) -> usize {
        (self.sums / (2 * dims.head_dim * dims.num_keys.max(1))).max(1)
    }

    /// The ranges of keys that are summed at a time; at least one, even if it is empty.
    pub(super) fn sum_blocks(
        &self,
        dims: &Dims,
        chunk: &HeadChunk,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let num_keys_that_fit = self.sums / (2 * dims.head_dim * chunk.num_kv_heads);
        let (len, num_keys) = ((num_keys_that_fit / self.keys).max(1) * self.keys, dims.num_keys);
        (0..num_keys.div_ceil(len).max(1)).map(move |block| block * len..num_keys.min((block + 1) * len))
    }

    /// Number of queries that a chunk of heads processes at a time.
    pub(super) fn query_block(&self, dims: &Dims, chunk: &HeadChunk) -> usize {
        let queries = self.rows / chunk.num_heads().max(1);
        let aligned = if queries > ALIGNMENT { queries / ALIGNMENT * ALIGNMENT } else { queries.max(1) };
        aligned.min(dims.num_queries)
    }

    /// Packed rows of the largest block of queries of any chunk.
    pub(super) fn max_rows(&self, dims: &Dims, chunks: &[HeadChunk]) -> usize {
        let rows = chunks.iter().map(|chunk| self.query_block(dims, chunk) * chunk.num_heads());
        rows.max().unwrap_or(0)
    }

    /// Distance between rows of scores, in elements.
    pub(super) fn score_stride(&self, dims: &Dims) -> usize {
        self.keys.min(dims.num_keys).next_multiple_of(8)
    }

    /// Tiles that cover the visible pairs of a block of queries and `keys`, which begin at a multiple of the
    /// tiling's keys.
    pub(super) fn tiles(
        &self,
        visible: &VisibleRanges,
        queries: Range<usize>,
        keys: &Range<usize>,
    ) -> impl Iterator<Item = Rectangle> {
        let hull = intersect(&visible.hull(&queries), keys);
        blocks(hull.clone(), keys.end, self.keys).filter_map(move |block| {
            let seen = intersect(&hull, &block);
            let seeing = intersect(&visible.queries_of(&seen), &queries);
            let tile = Rectangle { keys: aligned(&seen, &block), queries: aligned(&seeing, &queries) };
            (!seeing.is_empty()).then_some(tile)
        })
    }
}

/// Extends the range to multiples of [`ALIGNMENT`] within `bounds`.
fn aligned(range: &Range<usize>, bounds: &Range<usize>) -> Range<usize> {
    let start = (range.start / ALIGNMENT * ALIGNMENT).max(bounds.start);
    start..range.end.next_multiple_of(ALIGNMENT).min(bounds.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::tests::assert_covers_visible_pairs;
    use crate::attention::{AttentionError, AttentionLayout};

    const SMALL: Tiling = Tiling { rows: 128, keys: 96, heads: 4, sums: 0 };

    fn dims(num_heads: usize, num_kv_heads: usize) -> Dims {
        Dims { batch: 1, num_queries: 700, num_keys: 700, num_heads, num_kv_heads, head_dim: 8 }
    }

    #[test]
    fn the_kernels_support_the_keys_of_a_tile() {
        let constant = format!("kMaxKeys = {MAX_KEYS};");
        assert!(crate::device::sources::ATTENTION.text.contains(&constant), "{constant}");
        assert!([Tiling::FORWARD, Tiling::BACKWARD].iter().all(|tiling| tiling.keys <= MAX_KEYS));
    }

    #[test]
    fn chunks_hold_adjacent_kv_heads_with_equal_groups() {
        let chunks = |q_to_kv: &[usize], num_kv_heads, max_kv_heads| {
            let dims = dims(q_to_kv.len(), num_kv_heads);
            let chunks = SMALL.head_chunks(q_to_kv, &dims, max_kv_heads).into_iter();
            chunks.map(|c| [c.first_kv_head, c.num_kv_heads, c.group, c.first_head]).collect::<Vec<_>>()
        };
        assert_eq!(chunks(&[0, 1, 2, 3, 4, 5], 6, 9), [[0, 4, 1, 0], [4, 2, 1, 4]]);
        assert_eq!(chunks(&[0, 1, 2], 3, 2), [[0, 2, 1, 0], [2, 1, 1, 2]]);
        assert_eq!(chunks(&[0, 0, 1, 1, 2, 2], 3, 9), [[0, 2, 2, 0], [2, 1, 2, 4]]);
        assert_eq!(chunks(&[1, 0, 1, 3], 4, 9), [[0, 1, 1, 0], [1, 1, 2, 1], [2, 1, 0, 3], [3, 1, 1, 3]]);
        assert_eq!(chunks(&[0; 9], 1, 9), [[0, 1, 9, 0]]);
        assert!(chunks(&[], 0, 9).is_empty());
    }

    #[test]
    fn every_visible_pair_lies_in_exactly_one_tile() -> Result<(), AttentionError> {
        let positions: Vec<u32> = (0..700).collect();
        let even: Vec<u32> = (0..350).map(|index| 2 * index).collect();
        let layouts = [
            AttentionLayout::causal(1, 700, vec![0])?,
            AttentionLayout::new(
                positions.clone(),
                positions.clone(),
                vec![vec![0, 1, 90, 91, 400, 700]],
                vec![0],
                None,
            )?,
            AttentionLayout::new(
                positions.clone(),
                positions.clone(),
                vec![vec![0, 500, 700]],
                vec![0],
                Some(33),
            )?,
            AttentionLayout::new(even, positions, vec![vec![0, 350, 700]], vec![0], Some(300))?,
        ];
        for (case, layout) in layouts.iter().enumerate() {
            let (num_queries, num_keys) = (layout.q_positions().len(), layout.kv_positions().len());
            let visible = layout.visible(0);
            let tiles = [0..288, 288..num_keys].into_iter().flat_map(|keys| {
                blocks(0..num_queries, num_queries, 128)
                    .flat_map(move |queries| SMALL.tiles(visible, queries, &keys).collect::<Vec<_>>())
            });
            assert_covers_visible_pairs(layout, tiles, &format!("case {case}"));
        }
        Ok(())
    }

    #[test]
    fn documents_cost_no_more_than_their_own_blocks() -> Result<(), AttentionError> {
        let positions: Vec<u32> = (0..65536).collect();
        let boundaries: Vec<u32> = (0..=16).map(|document| document * 4096).collect();
        let layout = AttentionLayout::new(positions.clone(), positions, vec![boundaries], vec![0], None)?;
        let (tiling, keys) = (Tiling::FORWARD, 0..65536);
        let tiles =
            blocks(0..65536, 65536, 1024).flat_map(|queries| tiling.tiles(layout.visible(0), queries, &keys));
        let area: usize = tiles.map(|tile| tile.queries.len() * tile.keys.len()).sum();
        let visible = layout.num_visible_pairs() as usize;
        assert!(area * 4 <= visible * 5, "{area} for {visible} visible pairs");
        Ok(())
    }

    #[test]
    fn rows_and_sums_are_bounded_whatever_the_sequence() {
        for (num_keys, head_dim) in [(0, 64), (700, 8), (1 << 20, 128), (1 << 20, 64)] {
            let dims = Dims { num_queries: num_keys, num_keys, head_dim, ..dims(32, 32) };
            let tiling = Tiling::BACKWARD;
            let q_to_kv: Vec<usize> = (0..32).collect();
            for chunk in tiling.head_chunks(&q_to_kv, &dims, tiling.max_kv_heads(&dims)) {
                assert!(tiling.query_block(&dims, &chunk) * chunk.num_heads() <= tiling.rows);
                let blocks: Vec<_> = tiling.sum_blocks(&dims, &chunk).collect();
                assert!(
                    blocks.iter().all(|block| block.len() * 2 * head_dim * chunk.num_kv_heads <= tiling.sums)
                );
                assert_eq!(blocks.iter().map(ExactSizeIterator::len).sum::<usize>(), num_keys);
                assert!(!blocks.is_empty());
            }
        }
    }
}
