//! Modules that read whole sequences, computed by each rank for its own tokens only.
//!
//! A convolution needs the few tokens before a range of a rank's tokens, a recurrence the state before it. Ranks pass these on, in a
//! number of bytes that does not depend on the length of the sequence, where an [exchange of heads](super::HeadExchange) moves all
//! tokens. In a ring a rank has up to two ranges.

mod extended;
mod rows;
mod segments;
mod states;

pub(super) use extended::{ExtendedTokens, Reach, alloc};
pub(super) use states::{AffineMap, Direction};

use super::LayerError;
use crate::mesh::TokenRanges;
use candle_core::Tensor;
use ulysses_kernels::strided_copy::StridedBlock;

/// The blocks that a rank sends to and receives from each rank of its sequences, itself included.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShardBlocks {
    /// Blocks of the inputs, by receiver. The k-th for a rank has the shape of the k-th that it receives from this one.
    pub send: Vec<Vec<StridedBlock>>,
    /// Blocks of the outputs, by sender.
    pub receive: Vec<Vec<StridedBlock>>,
    /// Whether blocks are added to the outputs.
    pub adds: bool,
}

/// The ranks that share each sequence.
pub trait ShardChain: Send + Sync {
    /// This rank among them.
    fn rank(&self) -> usize;

    /// The tokens of every rank.
    fn shards(&self, seq_len: usize) -> Vec<TokenRanges>;

    /// Sends blocks of the inputs, and receives blocks of the outputs, in one collective. `is_backward`: they are gradients.
    ///
    /// # Errors
    /// Failed communication.
    fn exchange(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        blocks: ShardBlocks,
        is_backward: bool,
    ) -> Result<(), LayerError>;
}
