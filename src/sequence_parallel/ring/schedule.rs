//! The blocks of keys that a ring rank attends, and the ways that they travel.

use crate::comm::ProcessGroup;
use crate::mesh::{SeqSharding, TokenRanges};
use crate::sequence_parallel::SequenceParallelError;
use crate::sequence_parallel::shard::{Member, check_shard, seq_len};
use ulysses_kernels::attention::AttentionLayout;

/// The steps of one ring rank for a micro batch. In step `s` the rank attends the block of keys and values of the ring
/// rank `s` places before it. Steps in which no rank sees anything are left out.
#[derive(Debug)]
pub(super) struct RingSchedule {
    rank: usize,
    /// The layout of this rank's tokens.
    pub(super) own: AttentionLayout,
    /// Number of tokens of every ring rank.
    tokens: Vec<usize>,
    /// The way of every ring rank's block.
    routes: Vec<Route>,
    /// The steps, ascending, from 0; equal on all ranks.
    steps: Vec<usize>,
    /// For each step of a whole ring, the layout of this rank's queries and the keys of the block; `None` if no query sees
    /// a key.
    blocks: Vec<Option<AttentionLayout>>,
}

/// The ranks that see a block: for each distance after its owner, whether a query there sees one of its keys.
///
/// If these are the next ranks without a gap, as in a causal sequence, each passes the block to the next one, so that a
/// ring over several nodes sends it once into each node. Otherwise the owner sends it to each of them. Either way it is
/// sent once per rank that sees it.
#[derive(Debug, Clone)]
struct Route(Vec<bool>);

impl Route {
    /// The distance of the farthest rank that sees the block.
    fn last(&self) -> usize {
        self.0.iter().rposition(|sees| *sees).unwrap_or_default()
    }

    fn is_relayed(&self) -> bool {
        self.0[..=self.last()].iter().all(|sees| *sees)
    }

    fn is_relayed_after(&self, step: usize) -> bool {
        self.is_relayed() && step < self.last()
    }
}

/// A block that a rank sends while it attends one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// Its own one, to this rank.
    Own(usize),
    /// The one that it attends, to the next rank.
    Current(usize),
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
            return Err(SequenceParallelError::SequenceTooShortForRing { seq_len, ring_size: ranks });
        }
        let tokens: Vec<_> = (0..ranks).map(|rank| sharding.ring_tokens(seq_len, rank)).collect();
        check_shard(layout, &tokens[rank], Member { rank, group_size })?;
        let sees = |queries: usize, keys: usize| {
            layout.num_visible_pairs_between(tokens[queries].ranges(), tokens[keys].ranges()) > 0
        };
        let route_of = |owner: usize| {
            Route((0..ranks).map(|step| step == 0 || sees((owner + step) % ranks, owner)).collect())
        };
        let routes: Vec<Route> = (0..ranks).map(route_of).collect();
        let block = |step: usize| {
            let owner = (rank + ranks - step) % ranks;
            let own_queries = tokens[rank].ranges();
            let (documents, heads) = (layout.cu_seqlens().clone(), layout.q_to_kv().clone());
            let block = || {
                let keys = tokens[owner].ranges();
                let block = AttentionLayout::of_ranges(own_queries, keys, documents, heads, layout.window())?;
                Ok::<_, SequenceParallelError>(block.with_logits(layout.logits()))
            };
            routes[owner].0[step].then(block).transpose()
        };
        Ok(Self {
            rank,
            own: layout.clone(),
            steps: (0..ranks).filter(|&step| routes.iter().any(|route| route.0[step])).collect(),
            blocks: (0..ranks).map(block).collect::<Result<_, _>>()?,
            tokens: tokens.iter().map(TokenRanges::len).collect(),
            routes,
        })
    }

    /// The same tokens and window with the heads and the form of the logits of another layout.
    pub(super) fn with_heads(&self, layout: &AttentionLayout) -> Self {
        let with_heads = |block: &Option<AttentionLayout>| {
            let block = block.as_ref()?.with_heads(layout.q_to_kv().clone());
            Some(block.with_logits(layout.logits()))
        };
        Self {
            rank: self.rank,
            own: layout.clone(),
            tokens: self.tokens.clone(),
            routes: self.routes.clone(),
            steps: self.steps.clone(),
            blocks: self.blocks.iter().map(with_heads).collect(),
        }
    }

    /// The steps, ascending; equal on all ranks. The first is 0, with the rank's own block.
    pub(super) fn steps(&self) -> &[usize] {
        &self.steps
    }

    /// The step after this one.
    pub(super) fn next(&self, step: usize) -> Option<usize> {
        self.steps.iter().copied().find(|next| *next > step)
    }

    /// The layout of a step; `None` if the rank skips it.
    pub(super) fn block(&self, step: usize) -> Option<&AttentionLayout> {
        self.blocks[step].as_ref()
    }

    /// Number of tokens of the block that the rank attends in a step; `None` if it skips the step.
    pub(super) fn tokens(&self, step: usize) -> Option<usize> {
        self.block(step).map(|_| self.tokens[self.owner(step)])
    }

    /// The rank that sends the block of a step.
    pub(super) fn sender(&self, step: usize) -> usize {
        let owner = self.owner(step);
        if self.routes[owner].is_relayed() { self.rank_before() } else { owner }
    }

    /// The blocks that the rank sends in a step, while it receives that of the next step.
    pub(super) fn sent(&self, step: usize) -> impl Iterator<Item = Sent> {
        let own = &self.routes[self.rank];
        let passes_on = self.routes[self.owner(step)].is_relayed_after(step);
        let direct = self.next(step).filter(|&next| !own.is_relayed() && own.0[next]);
        let current = passes_on.then(|| Sent::Current(self.rank_after(1)));
        current.into_iter().chain(direct.map(|next| Sent::Own(self.rank_after(next))))
    }

    /// The rank to which this rank sends the gradients of the block of a step: the next one that adds its part, or the
    /// block's owner.
    pub(super) fn gradients_to(&self, step: usize) -> usize {
        let owner = self.owner(step);
        if self.routes[owner].is_relayed_after(step) { self.rank_after(1) } else { owner }
    }

    /// Number of tokens of the block of the step after this one, if the rank adds its gradients to those of the rank
    /// before it.
    pub(super) fn tokens_passed(&self, step: usize) -> Option<usize> {
        let next = self.next(step)?;
        self.tokens(next).filter(|_| self.routes[self.owner(next)].is_relayed())
    }

    /// The rank from which gradients of the own block return after a step.
    pub(super) fn returns_from(&self, step: usize) -> Option<usize> {
        let own = &self.routes[self.rank];
        (own.0[step] && !own.is_relayed_after(step)).then(|| self.rank_after(step))
    }

    /// The ring rank whose block this rank has in a step.
    fn owner(&self, step: usize) -> usize {
        self.at(self.rank + self.tokens.len() - step)
    }

    /// The ring rank before this one.
    pub(super) fn rank_before(&self) -> usize {
        self.owner(1)
    }

    /// The ring rank that is `places` after this one.
    fn rank_after(&self, places: usize) -> usize {
        self.at(self.rank + places)
    }

    fn at(&self, position: usize) -> usize {
        position % self.tokens.len()
    }
}

#[cfg(test)]
mod tests;
