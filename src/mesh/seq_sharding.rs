//! The tokens of each rank of an sp group.

use super::shard_range;
use std::fmt;
use std::ops::Range;

/// The division of a sequence over an sp group of `ring_size · ulysses_size` ranks.
///
/// Ulysses ranks are neighbors: sp rank `r` has ring rank `r / ulysses_size` and Ulysses rank `r % ulysses_size`. The
/// sequence is cut into `2 · ring_size` chunks; ring rank `r` has chunk `r` and chunk `2 · ring_size − 1 − r` (zigzag),
/// so that under a causal mask all ring ranks compute equally much (Llama 3, arXiv 2407.21783, section 3.3.2). Its
/// Ulysses ranks divide these tokens evenly, in order. Without a ring every rank has one contiguous range. Every rank has
/// a token if there are as many tokens as ranks.
///
/// ```
/// use ulysses::mesh::SeqSharding;
///
/// let sharding = SeqSharding { ring_size: 2, ulysses_size: 2 };
/// let tokens: Vec<String> = (0..4).map(|rank| sharding.tokens(16, rank).to_string()).collect();
/// assert_eq!(tokens, ["0..4", "12..16", "4..8", "8..12"]);
/// assert_eq!(SeqSharding::from(2).tokens(16, 1).to_string(), "8..16");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqSharding {
    /// Ranks of a ring: they hold different tokens of the same heads during attention.
    pub ring_size: usize,
    /// Ranks of a Ulysses group: they hold different heads of the same tokens during attention.
    pub ulysses_size: usize,
}

/// Limits of the Ulysses ranks of an sp group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UlyssesLimits {
    /// Query heads that the ranks divide: those of the smallest head chunk.
    pub num_heads: usize,
    /// KV heads that the ranks divide.
    pub num_kv_heads: usize,
    /// Ranks of a node.
    pub ranks_per_node: usize,
}

/// The sharding of an sp group of this size without a ring.
impl From<usize> for SeqSharding {
    fn from(sp_size: usize) -> Self {
        Self { ring_size: 1, ulysses_size: sp_size }
    }
}

impl SeqSharding {
    /// The sharding of an sp group with the smallest ring that leaves every Ulysses rank a head.
    ///
    /// ```
    /// use ulysses::mesh::SeqSharding;
    ///
    /// assert_eq!(SeqSharding::for_heads(16, 32).ring_size, 1);
    /// assert_eq!(SeqSharding::for_heads(16, 8), SeqSharding { ring_size: 2, ulysses_size: 8 });
    /// assert_eq!(SeqSharding::for_heads(5, 4), SeqSharding { ring_size: 5, ulysses_size: 1 });
    /// ```
    pub fn for_heads(sp_size: usize, num_heads: usize) -> Self {
        let fits = |ring: &usize| sp_size.is_multiple_of(*ring) && sp_size / ring <= num_heads;
        let ring_size = (1..=sp_size).find(fits).unwrap_or(1);
        Self { ring_size, ulysses_size: sp_size / ring_size }
    }

    /// The sharding of an sp group with the largest Ulysses groups that fit a node and divide the work evenly: each rank has
    /// equally many query heads, and either whole KV heads or one that it shares with whole ranks. Such groups exist
    /// always; those of one rank are a ring of all ranks.
    ///
    /// ```
    /// use ulysses::mesh::{SeqSharding, UlyssesLimits};
    ///
    /// let limits = UlyssesLimits { num_heads: 32, num_kv_heads: 8, ranks_per_node: 8 };
    /// assert_eq!(SeqSharding::auto(8, limits).ring_size, 1);
    /// assert_eq!(SeqSharding::auto(64, limits), SeqSharding { ring_size: 8, ulysses_size: 8 });
    /// let few = UlyssesLimits { num_heads: 6, num_kv_heads: 2, ..limits };
    /// let few = UlyssesLimits { ranks_per_node: 4, ..few };
    /// assert_eq!(SeqSharding::auto(4, few), SeqSharding { ring_size: 2, ulysses_size: 2 });
    /// ```
    pub fn auto(sp_size: usize, limits: UlyssesLimits) -> Self {
        let UlyssesLimits { num_heads, num_kv_heads, ranks_per_node } = limits;
        let is_even = |ulysses: usize| {
            num_heads.is_multiple_of(ulysses)
                && (num_kv_heads.is_multiple_of(ulysses) || ulysses.is_multiple_of(num_kv_heads))
        };
        // Groups of neighbors begin at multiples of their size.
        let fits = |ulysses: &usize| {
            sp_size.is_multiple_of(*ulysses) && ranks_per_node.is_multiple_of(*ulysses) && is_even(*ulysses)
        };
        let ulysses_size = (1..=sp_size.min(num_heads)).rev().find(fits).unwrap_or(1);
        Self { ring_size: sp_size / ulysses_size, ulysses_size }
    }

    /// The shardings of an sp group that are worth comparing: that of [`auto`](Self::auto), and that with the smallest ring
    /// that leaves every Ulysses rank a head, if it is another one; without those of a ring longer than
    /// [`MAX_COMPARED_RING`](Self::MAX_COMPARED_RING).
    pub fn choices(sp_size: usize, limits: UlyssesLimits) -> Vec<Self> {
        let mut choices = vec![Self::auto(sp_size, limits), Self::for_heads(sp_size, limits.num_heads)];
        choices.dedup();
        choices.retain(|choice| choice.ring_size <= Self::MAX_COMPARED_RING);
        choices
    }

    /// The longest ring among [`choices`](Self::choices). A layer takes as many steps as the ring has ranks, each with a
    /// share of the keys that shrinks with them; and a plan of the ring runs all of these steps.
    pub const MAX_COMPARED_RING: usize = 8;

    /// Number of ranks of the sp group.
    pub fn sp_size(self) -> usize {
        self.ring_size * self.ulysses_size
    }

    /// The tokens that a ring rank and its Ulysses group share; none if there is no such rank.
    pub fn ring_tokens(self, seq_len: usize, ring_rank: usize) -> TokenRanges {
        if ring_rank >= self.ring_size {
            return TokenRanges::default();
        }
        let chunk = |index: usize| shard_range(seq_len, 2 * self.ring_size, index);
        TokenRanges::joined([chunk(ring_rank), chunk(2 * self.ring_size - 1 - ring_rank)])
    }

    /// The tokens of an sp rank; none if there is no such rank.
    pub fn tokens(self, seq_len: usize, sp_rank: usize) -> TokenRanges {
        let ulysses_size = self.ulysses_size.max(1);
        let shared = self.ring_tokens(seq_len, sp_rank / ulysses_size);
        shared.slice(&shard_range(shared.len(), ulysses_size, sp_rank % ulysses_size))
    }
}

/// Tokens of a sequence, as ascending ranges of positions that neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct TokenRanges(Vec<Range<usize>>);

impl From<Range<usize>> for TokenRanges {
    fn from(range: Range<usize>) -> Self {
        Self::joined([range])
    }
}

impl TokenRanges {
    /// Joins ascending ranges.
    fn joined(ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in ranges.into_iter().filter(|range| !range.is_empty()) {
            match joined.last_mut().filter(|last| last.end == range.start) {
                Some(last) => last.end = range.end,
                None => joined.push(range),
            }
        }
        Self(joined)
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.0.iter().map(Range::len).sum()
    }

    /// Returns whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranges.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.0
    }

    /// The positions, ascending.
    pub fn positions(&self) -> impl Iterator<Item = usize> {
        self.0.iter().cloned().flatten()
    }

    /// The tokens with these indices among the tokens.
    pub fn slice(&self, indices: &Range<usize>) -> Self {
        let mut begin = 0;
        Self::joined(self.0.iter().map(|range| {
            let at = |index: usize| range.start + index.saturating_sub(begin).min(range.len());
            let part = at(indices.start)..at(indices.end);
            begin += range.len();
            part
        }))
    }
}

/// Writes `0..4, 12..16`.
impl fmt::Display for TokenRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges: Vec<String> = self.0.iter().map(|range| format!("{range:?}")).collect();
        f.write_str(&ranges.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_belongs_to_one_rank_and_ring_ranks_differ_by_two_tokens_at_most() {
        for (ring_size, ulysses_size) in [(1, 1), (1, 4), (2, 1), (2, 2), (3, 2), (4, 3), (8, 1)] {
            let sharding = SeqSharding { ring_size, ulysses_size };
            for seq_len in [sharding.sp_size(), sharding.sp_size() + 1, 64, 65, 101] {
                let of_ranks: Vec<_> =
                    (0..sharding.sp_size()).map(|rank| sharding.tokens(seq_len, rank)).collect();
                let mut all: Vec<usize> = of_ranks.iter().flat_map(TokenRanges::positions).collect();
                all.sort_unstable();
                assert_eq!(all, (0..seq_len).collect::<Vec<_>>(), "{sharding:?}, {seq_len} tokens");
                assert!(of_ranks.iter().all(|tokens| !tokens.is_empty()), "{sharding:?}, {seq_len} tokens");
                assert!(of_ranks.iter().all(|tokens| tokens.positions().is_sorted()));
                let lens = (0..ring_size).map(|rank| sharding.ring_tokens(seq_len, rank).len());
                let (min, max) = (lens.clone().min().unwrap(), lens.max().unwrap());
                assert!(max - min <= 2, "{sharding:?}, {seq_len} tokens: {min} to {max}");
            }
            assert!(sharding.tokens(64, sharding.sp_size()).is_empty());
        }
    }

    #[test]
    fn the_largest_groups_that_divide_the_heads_and_fit_a_node_are_chosen() {
        let sharding = |sp_size, [num_heads, num_kv_heads, ranks_per_node]: [usize; 3]| {
            let limits = UlyssesLimits { num_heads, num_kv_heads, ranks_per_node };
            let auto = SeqSharding::auto(sp_size, limits);
            assert_eq!(auto.sp_size(), sp_size);
            assert_eq!(SeqSharding::choices(sp_size, limits)[0], auto);
            (auto.ring_size, auto.ulysses_size)
        };
        // Two KV heads: four ranks share each.
        assert_eq!(sharding(64, [16, 2, 8]), (8, 8));
        // Fewer heads than the ranks of a node, a number of heads that does not divide, and one head.
        assert_eq!(sharding(8, [4, 2, 8]), (2, 4));
        assert_eq!(sharding(8, [5, 5, 8]), (8, 1));
        assert_eq!(sharding(8, [1, 1, 8]), (8, 1));
        // Four ranks would share three KV heads unevenly; a group of four would leave a node of six.
        assert_eq!(sharding(12, [12, 3, 12]), (1, 12));
        assert_eq!(sharding(4, [12, 3, 4]), (4, 1));
        assert_eq!(sharding(4, [12, 12, 6]), (2, 2));
        let across = UlyssesLimits { num_heads: 32, num_kv_heads: 8, ranks_per_node: 8 };
        let choices = SeqSharding::choices(16, across);
        assert_eq!(choices, [SeqSharding { ring_size: 2, ulysses_size: 8 }, SeqSharding::from(16)]);
        // A ring of 16 would be too long.
        assert_eq!(SeqSharding::choices(128, across), [SeqSharding { ring_size: 4, ulysses_size: 32 }]);
    }

    #[test]
    fn slices_count_tokens_across_gaps() {
        let tokens = SeqSharding { ring_size: 2, ulysses_size: 1 }.ring_tokens(16, 0);
        assert_eq!(tokens.to_string(), "0..4, 12..16");
        for (slice, expected) in
            [(0..8, "0..4, 12..16"), (2..6, "2..4, 12..14"), (4..5, "12..13"), (3..3, "")]
        {
            assert_eq!(tokens.slice(&slice).to_string(), expected, "{slice:?}");
        }
        assert_eq!(
            TokenRanges::joined([0..2, 2..2, 2..5]),
            TokenRanges::from(0..5),
            "ranges that touch are one"
        );
    }
}
