//! The attention of an engine: over all sp ranks, or over a block of them with flexible sequence parallelism.

use super::EngineError;
use crate::comm::{ProcessGroup, RingGroups, TrainingGroups};
use crate::config::Config;
use crate::data::MicroBatch;
use crate::mesh::SeqSharding;
use crate::nn::{HeadExchange, ShardChain};
use crate::sequence_parallel::{RingAttention, SequenceChain, UlyssesAttention, UlyssesHeads};
use std::sync::Arc;
use ulysses_kernels::attention::{Attention, AttentionCompute};

/// Attention that is shared by some sp ranks.
#[derive(Clone)]
pub(super) struct SharedAttention {
    pub(super) attention: Arc<dyn Attention>,
    /// The exchange of heads for other modules that read whole sequences; `None` for one rank.
    pub(super) heads: Option<Arc<dyn HeadExchange>>,
    /// The chain of ranks that pass on states instead, if the config says so.
    pub(super) chain: Option<Arc<dyn ShardChain>>,
    /// How the ranks share each sequence.
    pub(super) sharding: SeqSharding,
    /// This rank among them.
    pub(super) rank: usize,
}

/// The attention of one rank, by the number of ranks that share a sequence.
pub(super) struct BlockAttention {
    all: SharedAttention,
    /// By ascending number of ranks: with flexible sequence parallelism, those of one rank and of the
    /// [blocks](TrainingGroups::sp_blocks).
    blocks: Vec<SharedAttention>,
}

impl BlockAttention {
    /// Wraps a local attention, which sees whole sequences or blocks of a ring.
    pub(super) fn new(config: &Config, groups: &TrainingGroups, local: Arc<dyn AttentionCompute>) -> Self {
        let chain = |group: &Arc<dyn ProcessGroup>, sharding: SeqSharding| {
            let passes_states = config.ulysses.state_passing && sharding.sp_size() > 1;
            passes_states.then(|| Arc::new(SequenceChain::new(group.clone(), sharding)) as _)
        };
        let blocks = match config.ulysses.flexible_sp {
            false => Vec::new(),
            true => {
                let sharding = SeqSharding::from(1);
                let alone =
                    SharedAttention { attention: local.clone(), heads: None, chain: None, sharding, rank: 0 };
                let of_group = |group: &Arc<dyn ProcessGroup>| {
                    let (sharding, rank) = (SeqSharding::from(group.world_size()), group.rank());
                    let attention = Arc::new(UlyssesAttention::new(local.clone(), group.clone()));
                    let heads = Some(Arc::new(UlyssesHeads::new(group.clone(), sharding)) as _);
                    let chain = chain(group, sharding);
                    SharedAttention { attention, heads, chain, sharding, rank }
                };
                std::iter::once(alone).chain(groups.sp_blocks.iter().map(of_group)).collect()
            }
        };
        let sharding = config.seq_sharding();
        let heads = Some(Arc::new(UlyssesHeads::new(groups.sp.clone(), sharding)) as _);
        let chain = chain(&groups.sp, sharding);
        let attention: Arc<dyn Attention> = match &groups.ring {
            None => Arc::new(UlyssesAttention::new(local, groups.sp.clone())),
            Some(RingGroups { ring, ulysses }) => {
                ring.progress_in_background();
                let in_ring = Arc::new(RingAttention::new(local, ring.clone(), sharding));
                Arc::new(UlyssesAttention::within_ring(in_ring, ulysses.clone(), sharding, ring.rank()))
            }
        };
        if config.overlaps_exchange() {
            let exchanging = groups.ring.as_ref().map_or(&groups.sp, |groups| &groups.ulysses);
            std::iter::once(exchanging)
                .chain(&groups.sp_blocks)
                .for_each(|group| group.progress_in_background());
        }
        let rank = groups.sp.rank();
        Self { all: SharedAttention { attention, heads, chain, sharding, rank }, blocks }
    }

    /// Returns the attention of the ranks that share a micro batch.
    ///
    /// # Errors
    /// A block of a number of ranks that this rank has no group for.
    pub(super) fn of(&self, batch: &MicroBatch) -> Result<&SharedAttention, EngineError> {
        let sp_size = self.all.sharding.sp_size();
        let Some(step) = batch.flexible.filter(|step| step.block_size != sp_size) else {
            return Ok(&self.all);
        };
        let is_of_size = |block: &&SharedAttention| block.sharding.sp_size() == step.block_size;
        self.blocks.iter().find(is_of_size).ok_or_else(|| EngineError::NoBlock {
            block_size: step.block_size,
            available: self.blocks.iter().map(|block| block.sharding.sp_size()).chain([sp_size]).collect(),
        })
    }
}
