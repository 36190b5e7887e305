//! Tensor parallelism: the ranks that divide a layer, and the tokens that they exchange around its modules.

use super::LayerError;
use candle_core::Tensor;

/// One of the ranks that divide the weights of every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorRank {
    /// Number of ranks.
    pub size: usize,
    /// This rank.
    pub rank: usize,
}

/// The exchange of tokens between the ranks that divide a layer's weights. Between modules each rank has some tokens of its
/// sp rank's shard (Megatron's sequence parallelism, arXiv 2205.05198); a module needs all of them.
pub trait TokenExchange: Send + Sync {
    /// Gathers the tokens of all ranks: `seq_local` per sequence. Collective.
    ///
    /// # Shapes
    /// `[batch, some tokens, width]` → `[batch, seq_local, width]`.
    ///
    /// # Errors
    /// Failed communication.
    fn gather(&self, some: &Tensor, seq_local: usize) -> Result<Tensor, LayerError>;

    /// Sums a tensor of which every rank has a summand, and returns this rank's tokens. Collective.
    ///
    /// # Shapes
    /// `[batch, seq_local, width]` → `[batch, some tokens, width]`.
    ///
    /// # Errors
    /// Failed communication.
    fn sum_scatter(&self, summand: &Tensor) -> Result<Tensor, LayerError>;
}
