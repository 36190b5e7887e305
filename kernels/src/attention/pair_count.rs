//! The number of visible (query, key) pairs in closed form: for dry runs, which have no positions, and
//! for the tokens of other ranks.

use std::ops::Range;

/// Counts the pairs of tokens, given as ascending ranges of positions, in all sequences: same document, key not later
/// than query, and within the window.
pub(super) fn num_pairs(
    queries: &[Range<usize>],
    keys: &[Range<usize>],
    cu_seqlens: &[Vec<u32>],
    window: Option<usize>,
) -> u64 {
    let documents = cu_seqlens.iter().flat_map(|bounds| bounds.windows(2));
    let of_document = |document: &[u32]| {
        let document = document[0] as usize..document[1] as usize;
        let pairs = queries.iter().flat_map(|queries| keys.iter().map(move |keys| (queries, keys)));
        let count = |(queries, keys): (&Range<usize>, &Range<usize>)| {
            visible_pairs(&overlap(queries, &document), &overlap(keys, &document), window)
        };
        pairs.map(count).fold(0, u64::saturating_add)
    };
    documents.map(of_document).fold(0, u64::saturating_add)
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Pairs of one document: Σ over queries q of the keys up to q, minus those up to q − window.
fn visible_pairs(queries: &Range<usize>, keys: &Range<usize>, window: Option<usize>) -> u64 {
    if queries.is_empty() || keys.is_empty() {
        return 0;
    }
    // Σ over x < `past` of the number of keys before x.
    let keys_before = |past: usize| {
        let growing = (past.clamp(keys.start, keys.end) - keys.start) as u64;
        growing * growing.saturating_sub(1) / 2 + past.saturating_sub(keys.end) as u64 * keys.len() as u64
    };
    let up_to = |offset: usize| {
        let shifted = |query: usize| (query + 1).saturating_sub(offset);
        keys_before(shifted(queries.end)) - keys_before(shifted(queries.start))
    };
    up_to(0) - window.map_or(0, up_to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::AttentionLayout;

    #[test]
    fn the_closed_form_counts_what_the_ranges_have() {
        let documents = [vec![vec![0, 40]], vec![vec![0, 11, 12, 12, 30, 40], vec![0, 40]]];
        let shards =
            [vec![0..17, 17..40], vec![0..7, 33..40], vec![7..13, 27..33], vec![13..20, 20..27], vec![]];
        for cu_seqlens in documents {
            for (queries, keys) in shards.iter().flat_map(|q| shards.iter().map(move |k| (q, k))) {
                for window in [None, Some(1), Some(9), Some(40), Some(1000)] {
                    let layout =
                        AttentionLayout::of_ranges(queries, keys, cu_seqlens.clone(), vec![0], window)
                            .unwrap();
                    let got = num_pairs(queries, keys, &cu_seqlens, window);
                    assert_eq!(got, layout.num_visible_pairs(), "{queries:?}, {keys:?}, window {window:?}");
                }
            }
        }
    }
}
