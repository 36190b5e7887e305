//! The blocks of keys that a ring rank attends, and how far they travel.

use crate::comm::ProcessGroup;
use crate::mesh::{SeqSharding, TokenRanges};
use crate::sequence_parallel::SequenceParallelError;
use crate::sequence_parallel::shard::{check_shard, seq_len};
use ulysses_kernels::attention::AttentionLayout;

/// The steps of one ring rank for a micro batch. In step `s` the rank has the block of keys and values of the ring rank
/// `s` places before it.
#[derive(Debug)]
pub(super) struct RingSchedule {
    rank: usize,
    /// The layout of this rank's tokens.
    pub(super) own: AttentionLayout,
    /// Number of tokens of every ring rank.
    tokens: Vec<usize>,
    /// Number of hops of every ring rank's block: to the last rank of which a query sees one of its keys.
    hops: Vec<usize>,
    /// For each step, the layout of this rank's queries and the keys of the block; `None` if no query sees a key.
    blocks: Vec<Option<AttentionLayout>>,
}

impl RingSchedule {
    /// # Errors
    /// A group of another size than the ring, fewer tokens than ranks, or a layout that is not of this rank's tokens.
    pub(super) fn new(
        layout: &AttentionLayout,
        sharding: SeqSharding,
        group: &dyn ProcessGroup,
    ) -> Result<Self, SequenceParallelError> {
        let (seq_len, rank) = (seq_len(layout), group.rank());
        let (ranks, group_size) = (sharding.ring_size, group.world_size());
        if ranks != group_size {
            return Err(SequenceParallelError::RingSize { ring_size: ranks, group_size });
        }
        if seq_len < ranks {
            return Err(SequenceParallelError::SequenceTooShort { seq_len, sp_size: ranks });
        }
        let tokens: Vec<_> = (0..ranks).map(|rank| sharding.ring_tokens(seq_len, rank)).collect();
        check_shard(layout, &tokens[rank], (rank, ranks))?;
        let sees = |queries: usize, keys: usize| {
            layout.num_visible_pairs_between(tokens[queries].ranges(), tokens[keys].ranges()) > 0
        };
        let hops_of = |owner: usize| {
            (1..ranks).rev().find(|hops| sees((owner + hops) % ranks, owner)).unwrap_or_default()
        };
        let block = |step: usize| {
            let owner = (rank + ranks - step) % ranks;
            let own_queries = tokens[rank].ranges();
            let (documents, heads) = (layout.cu_seqlens().clone(), layout.q_to_kv().clone());
            let block = || {
                AttentionLayout::of_ranges(
                    own_queries,
                    tokens[owner].ranges(),
                    documents,
                    heads,
                    layout.window(),
                )
            };
            sees(rank, owner).then(block).transpose()
        };
        Ok(Self {
            rank,
            own: layout.clone(),
            hops: (0..ranks).map(hops_of).collect(),
            blocks: (0..ranks).map(block).collect::<Result<_, _>>()?,
            tokens: tokens.iter().map(TokenRanges::len).collect(),
        })
    }

    /// The same tokens with other heads.
    pub(super) fn with_heads(&self, layout: &AttentionLayout) -> Self {
        let with_heads = |block: &Option<AttentionLayout>| {
            block.as_ref().map(|block| block.with_heads(layout.q_to_kv().clone()))
        };
        Self {
            rank: self.rank,
            own: layout.clone(),
            tokens: self.tokens.clone(),
            hops: self.hops.clone(),
            blocks: self.blocks.iter().map(with_heads).collect(),
        }
    }

    /// The largest number of hops of a block; equal on all ranks.
    pub(super) fn num_hops(&self) -> usize {
        self.hops.iter().copied().max().unwrap_or_default()
    }

    /// The layout of a step; `None` if the rank skips it.
    pub(super) fn block(&self, step: usize) -> Option<&AttentionLayout> {
        self.blocks[step].as_ref()
    }

    /// Number of tokens of the block that the rank has in a step; `None` if it has none.
    pub(super) fn tokens(&self, step: usize) -> Option<usize> {
        let owner = self.owner(step);
        (step <= self.hops[owner]).then(|| self.tokens[owner])
    }

    /// Number of hops of the block that the rank has in a step.
    pub(super) fn hops(&self, step: usize) -> usize {
        self.hops[self.owner(step)]
    }

    /// The ring rank whose block this rank has in a step.
    pub(super) fn owner(&self, step: usize) -> usize {
        self.at(self.rank + self.tokens.len() - step)
    }

    /// The ring rank that is `places` after this one.
    pub(super) fn rank_after(&self, places: usize) -> usize {
        self.at(self.rank + places)
    }

    /// The ring rank before this one.
    pub(super) fn previous(&self) -> usize {
        self.owner(1)
    }

    fn at(&self, position: usize) -> usize {
        position % self.tokens.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::fake::FakeGroup;

    /// Visible pairs of every ring rank, over all its steps.
    fn pairs(ring_size: usize, seq_len: usize) -> Vec<u64> {
        let sharding = SeqSharding { ring_size, ulysses_size: 1 };
        let of_rank = |rank: usize| {
            let tokens = sharding.ring_tokens(seq_len, rank);
            let documents = vec![vec![0, seq_len as u32]];
            let layout =
                AttentionLayout::of_ranges(tokens.ranges(), tokens.ranges(), documents, vec![0], None)
                    .unwrap();
            let group = FakeGroup::new("ring", (0..ring_size).collect(), rank).unwrap();
            let schedule = RingSchedule::new(&layout, sharding, &group).unwrap();
            schedule.blocks.iter().flatten().map(AttentionLayout::num_visible_pairs).sum()
        };
        (0..ring_size).map(of_rank).collect()
    }

    #[test]
    fn causal_work_is_within_two_percent_on_all_ring_ranks() {
        for ring_size in [2, 3, 4, 8, 16] {
            for seq_len in [2048, 4099, 10_007] {
                let pairs = pairs(ring_size, seq_len);
                assert_eq!(
                    pairs.iter().sum::<u64>(),
                    (seq_len * (seq_len + 1) / 2) as u64,
                    "every pair once"
                );
                let (least, most) = (pairs.iter().min().unwrap(), pairs.iter().max().unwrap());
                let excess = *most as f64 / *least as f64 - 1.0;
                assert!(excess < 0.02, "ring {ring_size}, {seq_len} tokens: {excess:.4} more");
            }
        }
    }

    #[test]
    fn a_ring_that_does_not_fit_its_group_or_its_tokens_is_refused() {
        let contiguous = std::slice::from_ref(&(0..2));
        let layout =
            AttentionLayout::of_ranges(contiguous, contiguous, vec![vec![0, 4]], vec![0], None).unwrap();
        let group = FakeGroup::new("ring", vec![0, 1], 0).unwrap();
        let error = |ring_size| {
            let sharding = SeqSharding { ring_size, ulysses_size: 1 };
            RingSchedule::new(&layout, sharding, &group).unwrap_err().to_string()
        };
        assert_eq!(error(3), "the sharding has a ring of 3 ranks, but its group has 2");
        assert_eq!(
            error(2),
            "rank 0 of 2 in the sp group holds tokens 0..1, 3..4 of a sequence of 4, but its layout covers positions 0 to 1"
        );
    }
}
