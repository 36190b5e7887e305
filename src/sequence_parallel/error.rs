//! Errors of the exchange.

use crate::comm::CommError;
use crate::mesh::{SeqSharding, TokenRanges};
use ulysses_kernels::OpError;
use ulysses_kernels::attention::AttentionError;

/// An error of the Ulysses exchange.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SequenceParallelError {
    /// Some sp rank would get no attention head.
    #[error(
        "num_heads = {num_heads} cannot be split over sp = {sp_size} ranks: every rank needs a head, \
         so the largest valid sp is {num_heads}; to use more ranks, add a ring (without \
         `ulysses.flexible_sp`): `ulysses.ring_size` {}",
        SeqSharding::for_heads(*sp_size, *num_heads).ring_size,
    )]
    TooFewHeads {
        /// Query heads of the model.
        num_heads: usize,
        /// Ranks of the sp axis.
        sp_size: usize,
    },
    /// Some rank of a ring's Ulysses groups would get no attention head.
    #[error(
        "num_heads = {num_heads} cannot be split over the {} ranks of a Ulysses group (sp {} in a ring of {}): every rank \
         needs a head; set `ulysses.ring_size` {}",
        sharding.ulysses_size,
        sharding.sp_size(),
        sharding.ring_size,
        SeqSharding::for_heads(sharding.sp_size(), *num_heads).ring_size,
    )]
    TooFewHeadsInRing {
        /// Query heads of the model.
        num_heads: usize,
        /// The sharding.
        sharding: SeqSharding,
    },
    /// A ring has another number of ranks than its group.
    #[error("the sharding has a ring of {ring_size} ranks, but its group has {group_size}")]
    RingSize {
        /// Ranks of the ring by the sharding.
        ring_size: usize,
        /// Ranks of the group.
        group_size: usize,
    },
    /// Some sp rank would get no token.
    #[error(
        "seq_len = {seq_len} cannot be split over sp = {sp_size} ranks: the largest valid sp is {seq_len}"
    )]
    SequenceTooShort {
        /// Tokens per sequence.
        seq_len: usize,
        /// Ranks of the sp axis.
        sp_size: usize,
    },
    /// Some rank of a ring would get no token.
    #[error(
        "seq_len = {seq_len} cannot be split over a ring of {ring_size} ranks: every rank needs a token, so the largest \
         valid `ulysses.ring_size` is {seq_len}"
    )]
    SequenceTooShortForRing {
        /// Tokens per sequence.
        seq_len: usize,
        /// Ranks of the ring.
        ring_size: usize,
    },
    /// The rank does not exist.
    #[error("sp rank {rank} does not exist: the sp axis has {sp_size} ranks")]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// Ranks of the sp axis.
        sp_size: usize,
    },
    /// The map from query heads to KV heads cannot be split over ranks.
    #[error(
        "q_to_kv must map {num_heads} query heads to {num_kv_heads} KV heads in ascending order without gaps, \
         got {q_to_kv:?}"
    )]
    HeadMap {
        /// Query heads of the model.
        num_heads: usize,
        /// Key/value heads of the model.
        num_kv_heads: usize,
        /// The given map.
        q_to_kv: Vec<usize>,
    },
    /// A tensor does not have the shape of the plan.
    #[error("{tensor}: expected [batch, seq, heads, head_dim] = {expected:?} on sp rank {rank}, got {got:?}")]
    Shape {
        /// Name of the tensor.
        tensor: &'static str,
        /// Rank within the sp group.
        rank: usize,
        /// Shape by the plan.
        expected: Vec<usize>,
        /// Actual shape.
        got: Vec<usize>,
    },
    /// The local tokens are not this rank's shard of the sequences.
    #[error(
        "rank {rank} of {group_size} in the sp group holds tokens {expected} of a sequence of {seq_len}, \
         but its layout covers {}",
        got.map_or("no position".into(), |(first, last)| format!("positions {first} to {last}"))
    )]
    Shard {
        /// Rank within the Ulysses group or the ring.
        rank: usize,
        /// Ranks of that group.
        group_size: usize,
        /// Tokens per sequence.
        seq_len: usize,
        /// Tokens that this rank should hold.
        expected: TokenRanges,
        /// First and last position of the layout.
        got: Option<(u32, u32)>,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The local attention failed.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// An allocation failed.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl SequenceParallelError {
    /// The error of an exchange plan for sequences of `seq_len` tokens, within a ring if the sharding has one.
    pub fn within(self, sharding: SeqSharding, seq_len: usize) -> Self {
        match self {
            Self::SequenceTooShort { .. } => Self::SequenceTooShort { seq_len, sp_size: sharding.sp_size() },
            Self::TooFewHeads { num_heads, .. } if sharding.ring_size > 1 => {
                Self::TooFewHeadsInRing { num_heads, sharding }
            }
            other => other,
        }
    }
}

impl From<SequenceParallelError> for AttentionError {
    fn from(error: SequenceParallelError) -> Self {
        match error {
            SequenceParallelError::Attention(error) => error,
            other => Self::other(other),
        }
    }
}
