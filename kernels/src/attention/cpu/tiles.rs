//! Divides the visible (query, key) pairs into rectangles.

use crate::attention::{
    VisibleRanges,
    blocks::{Rectangle, blocks, intersect},
};
use crate::matrix::{Mat, MatMut};
use crate::simd::LANES;
use std::ops::Range;

/// Queries per tile. A multiple of the step of every [`Precision`](super::Precision).
pub(super) const QUERY_BLOCK: usize = 480;
/// Keys per tile.
pub(super) const KEY_BLOCK: usize = 256;
/// Distance between two rows of scores. Not a power of two, so that a column is spread over the cache sets.
pub(super) const ROW_STRIDE: usize = KEY_BLOCK + LANES;
/// Maximum number of elements of a head that a task copies together, unless a tile is larger. They stay in
/// the second-level cache, so the other operand is copied only once for all of them.
const CACHED_ELEMENTS: usize = 1 << 17;
/// Queries per rectangle in partly visible tiles.
const PANEL: usize = 48;
/// Minimum number of fully visible keys of a tile for a separate rectangle.
const MIN_DENSE_KEYS: usize = 64;

/// Returns whether the blocks of keys, and the queries of every rectangle within their block, begin at a multiple of
/// `terms`.
pub(super) const fn begin_at_multiples(terms: usize) -> bool {
    KEY_BLOCK.is_multiple_of(terms) && QUERY_BLOCK.is_multiple_of(terms) && PANEL.is_multiple_of(terms)
}

/// Tokens of the tiles, of `tile` tokens each, that a task keeps in the cache.
pub(super) fn cached_tokens(tile: usize, head_dim: usize) -> usize {
    tile * (CACHED_ELEMENTS / (tile * head_dim.max(1))).max(1)
}

impl Rectangle {
    /// Its scores in a buffer, or others of their shape, `[queries, keys]`.
    pub(super) fn scores<'a>(&self, buffer: &'a [f32]) -> Mat<'a> {
        Mat::new(buffer, self.queries.len(), self.keys.len(), ROW_STRIDE)
    }

    /// The same to write.
    pub(super) fn scores_mut<'a>(&self, buffer: &'a mut [f32]) -> MatMut<'a> {
        MatMut::new(buffer, self.queries.len(), self.keys.len(), ROW_STRIDE)
    }
}

/// Cuts the rectangles into strips of at most `rows` queries.
pub(super) fn strips(
    rectangles: impl Iterator<Item = Rectangle>,
    rows: usize,
) -> impl Iterator<Item = Rectangle> {
    rectangles.flat_map(move |Rectangle { queries, keys }| {
        let end = queries.end;
        queries
            .step_by(rows)
            .map(move |start| Rectangle { queries: start..end.min(start + rows), keys: keys.clone() })
    })
}

/// Rectangles that cover the visible pairs of `queries` and `keys`, each pair once.
///
/// The keys that all queries see form one rectangle. The rest on either side (the diagonal, edges of
/// documents and of the window) is cut into panels of few queries, each with the keys that it needs. All
/// begin at a multiple of `group` keys, as `keys` must, and end at one or with `keys`.
pub(super) fn rectangles(
    visible: &VisibleRanges,
    queries: Range<usize>,
    keys: Range<usize>,
    group: usize,
) -> impl Iterator<Item = Rectangle> {
    let seen = intersect(&visible.hull(&queries), &keys);
    let hull = whole_groups(&seen, &keys, group);
    let common = intersect(&visible.common(&queries), &seen);
    let start = if common.start == seen.start { hull.start } else { common.start.next_multiple_of(group) };
    let end = if common.end == seen.end { hull.end } else { common.end / group * group };
    let mut dense = start..end.max(start);
    if dense.len() < MIN_DENSE_KEYS && common != seen {
        dense = hull.start..hull.start;
    }
    let sides = [hull.start..dense.start, dense.end..hull.end];
    let panels = blocks(queries.clone(), queries.end, PANEL).flat_map(move |panel| {
        let seen = visible.hull(&panel);
        sides.clone().map(|side| Rectangle {
            keys: whole_groups(&intersect(&seen, &side), &side, group),
            queries: panel.clone(),
        })
    });
    std::iter::once(Rectangle { queries, keys: dense })
        .chain(panels)
        .filter(|rectangle| !rectangle.keys.is_empty())
}

/// The groups of `whole` that overlap `part`.
fn whole_groups(part: &Range<usize>, whole: &Range<usize>, group: usize) -> Range<usize> {
    if part.is_empty() {
        return part.clone();
    }
    part.start / group * group..part.end.next_multiple_of(group).min(whole.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::tests::assert_covers_visible_pairs;
    use crate::attention::{AttentionError, AttentionLayout};

    fn packed(
        length: u32,
        boundaries: Vec<u32>,
        window: Option<usize>,
    ) -> Result<AttentionLayout, AttentionError> {
        let positions: Vec<u32> = (0..length).collect();
        AttentionLayout::new(positions.clone(), positions, vec![boundaries], vec![0], window)
    }

    fn all_rectangles(layout: &AttentionLayout, group: usize) -> Vec<Rectangle> {
        let visible = layout.visible(0);
        let (num_queries, num_keys) = (layout.q_positions().len(), layout.kv_positions().len());
        blocks(0..num_queries, num_queries, QUERY_BLOCK)
            .flat_map(|queries| {
                blocks(visible.hull(&queries), num_keys, KEY_BLOCK)
                    .flat_map(move |keys| rectangles(visible, queries.clone(), keys, group))
            })
            .collect()
    }

    fn area(rectangles: &[Rectangle]) -> usize {
        rectangles.iter().map(|rectangle| rectangle.queries.len() * rectangle.keys.len()).sum()
    }

    #[test]
    fn every_visible_pair_lies_in_exactly_one_rectangle() -> Result<(), AttentionError> {
        let even: Vec<u32> = (0..700).map(|index| 2 * index).collect();
        let late: Vec<u32> = (300..1400).collect();
        let thirds: Vec<u32> = (0..333).map(|index| 3 * index).collect();
        let layouts = [
            packed(700, vec![0, 700], None)?,
            packed(700, vec![0, 1, 90, 91, 400, 700], None)?,
            packed(700, vec![0, 500, 700], Some(33))?,
            packed(900, vec![0, 900], Some(300))?,
            AttentionLayout::new(even.clone(), late.clone(), vec![vec![0, 800, 1400]], vec![0], None)?,
            AttentionLayout::new(late, even, vec![vec![0, 350, 1400]], vec![0], Some(500))?,
            packed(601, vec![0, 37, 90, 91, 601], Some(301))?,
            AttentionLayout::new(thirds.clone(), thirds, vec![vec![0, 400, 1000]], vec![0], None)?,
        ];
        let cases = layouts.iter().enumerate().flat_map(|case| [(case, 1), (case, 2)]);
        for ((case, layout), group) in cases {
            let num_keys = layout.kv_positions().len();
            let rectangles = all_rectangles(layout, group);
            for Rectangle { keys, .. } in &rectangles {
                assert!(keys.start.is_multiple_of(group), "case {case}: {keys:?}");
                assert!(keys.end.is_multiple_of(group) || keys.end == num_keys, "case {case}: {keys:?}");
            }
            assert_covers_visible_pairs(layout, rectangles, &format!("case {case}, groups of {group}"));
        }
        Ok(())
    }

    #[test]
    fn the_diagonal_wastes_little_and_documents_cost_their_own_squares() -> Result<(), AttentionError> {
        let whole = all_rectangles(&packed(4096, vec![0, 4096], None)?, 1);
        let visible = 4096 * 4097 / 2;
        assert!(area(&whole) * 50 < visible * 51, "{} for {visible} visible pairs", area(&whole));
        let boundaries: Vec<u32> = (0..=16).map(|document| document * 256).collect();
        let documents = all_rectangles(&packed(4096, boundaries, None)?, 1);
        assert!(area(&documents) * 12 < area(&whole), "{} of {}", area(&documents), area(&whole));
        Ok(())
    }
}
