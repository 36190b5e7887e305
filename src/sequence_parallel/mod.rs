//! Ulysses sequence parallelism: the all-to-all around attention.
//!
//! Every rank of an `sp` group holds `seq/sp` tokens of each sequence, with all heads. One all-to-all turns
//! these into the whole sequence with `heads/sp` heads. Then any local attention runs, and a second
//! all-to-all turns its output back (DeepSpeed-Ulysses, arXiv 2309.14509).
//!
//! ```text
//! q,k,v [B, S/sp, H, D] ──one all-to-all──► [B, S, H/sp, D] ─ attention ─► o ──one all-to-all──► [B, S/sp, H, D]
//! ```
//!
//! - [`ExchangePlan`]: which tokens and heads go to which rank. Pure integers.
//! - [`Exchange`]: executes a plan over a process group. Layouts are types: [`SeqSharded`] and
//!   [`HeadSharded`].
//! - [`UlyssesAttention`]: wraps a local attention, and implements
//!   [`Attention`](ulysses_kernels::attention::Attention) itself.
//! - [`UlyssesHeads`]: the same exchange around other modules, as linear attention. It implements
//!   [`HeadExchange`](crate::nn::HeadExchange).
//! - [`SequenceChain`]: what replaces it, if these modules pass states on. It implements [`ShardChain`](crate::nn::ShardChain).
//! - [`RingAttention`]: the second axis of sequence parallelism, for more ranks than heads. Between the two, a
//!   [`SeqSharding`](crate::mesh::SeqSharding) divides the tokens.
//!
//! The folder's README derives the volumes and explains uneven heads.

mod attention;
mod chain;
mod error;
mod exchange;
mod head_blocks;
mod heads;
mod plan;
mod ring;
mod shard;
#[cfg(test)]
mod tests;
mod volume;

pub use attention::UlyssesAttention;
pub use chain::SequenceChain;
pub use error::SequenceParallelError;
pub use exchange::{Exchange, HeadSharded, PendingExchange, Qkv, SeqSharded};
pub use heads::UlyssesHeads;
pub use plan::{AttentionShape, ExchangePlan, ExchangedDims};
pub use ring::RingAttention;
pub use volume::{ExchangeVolume, RingVolume, SpShard};
