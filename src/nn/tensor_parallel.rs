//! Tensor parallelism: the ranks that divide a layer, how they divide a weight, and the tokens that they exchange around modules.

use super::LayerError;
use crate::mesh::shard_range;
use candle_core::Tensor;
use std::ops::Range;

/// One of the ranks that divide the weights of every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorRank {
    /// Number of ranks.
    pub size: usize,
    /// This rank.
    pub rank: usize,
}

impl TensorRank {
    /// The range of each rank, if the ranks divide `len` as evenly as possible.
    pub(crate) fn ranges(self, len: usize) -> impl Iterator<Item = Range<usize>> {
        (0..self.size).map(move |rank| shard_range(len, self.size, rank))
    }
}

/// How the ranks of tp divide the weight `[out, in]` of `y = x·Wᵀ + b`: torch's `ColwiseParallel` and `RowwiseParallel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParallelStyle {
    /// Each rank has some outputs: rows of the weight, and their biases.
    Colwise,
    /// Each rank has some inputs: columns of the weight. The ranks' outputs are summed, then the bias is added.
    Rowwise,
}

impl ParallelStyle {
    /// The dimension of a weight `[out, in]` that the ranks divide.
    pub fn dim(self) -> usize {
        usize::from(self == Self::Rowwise)
    }
}

/// Whether some ranks have the same indices, of the ascending ranges of all.
pub(crate) fn are_shared(ranks: &[Range<usize>]) -> bool {
    ranks.windows(2).any(|pair| pair[0].end > pair[1].start)
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
    fn all_gather(&self, some: &Tensor, seq_local: usize) -> Result<Tensor, LayerError>;

    /// Sums a tensor of which every rank has a partial sum, and returns this rank's tokens. Collective.
    ///
    /// # Shapes
    /// `[batch, seq_local, width]` → `[batch, some tokens, width]`.
    ///
    /// # Errors
    /// Failed communication.
    fn reduce_scatter(&self, partial: &Tensor) -> Result<Tensor, LayerError>;

    /// Trades features of all tokens, which the ranks divide, for all features of this rank's tokens. Collective.
    ///
    /// # Shapes
    /// `[batch, seq_local, some of width]` → `[batch, some tokens, width]`.
    ///
    /// # Errors
    /// Failed communication.
    fn features_to_tokens(&self, part: &Tensor, width: usize) -> Result<Tensor, LayerError>;

    /// Sums a tensor of which every rank has a partial sum, in place. Collective.
    ///
    /// # Errors
    /// Failed communication.
    fn all_reduce(&self, partial: &Tensor) -> Result<(), LayerError>;

    /// Gathers rows, of which each rank has as many as `counts` says. Collective.
    ///
    /// # Shapes
    /// `own`: `[counts[rank], width]`, `all`: `[sum of counts, width]`.
    ///
    /// # Errors
    /// Failed communication.
    fn all_gather_rows(&self, own: &Tensor, counts: &[usize], all: &Tensor) -> Result<(), LayerError>;

    /// Sums rows of which every rank has a partial sum, in rank order, and writes those that [`all_gather_rows`](Self::all_gather_rows) gets from
    /// this rank. Collective.
    ///
    /// # Shapes
    /// `partial`: `[sum of counts, width]`, `own`: `[counts[rank], width]`.
    ///
    /// # Errors
    /// Failed communication.
    fn reduce_scatter_rows(&self, partial: &Tensor, counts: &[usize], own: &Tensor)
    -> Result<(), LayerError>;
}
