//! The exchange of tokens for heads around a module that reads whole sequences.

use super::LayerError;
use crate::mesh::shard_range;
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::Workspace;

/// The heads that the ranks of a sequence divide: value heads, of which equally many neighbors use the same key head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GroupedHeads {
    /// Key heads; a divisor of `num_value_heads`.
    pub num_key_heads: usize,
    /// Value heads.
    pub num_value_heads: usize,
}

/// One rank's heads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadShare {
    /// The key heads that the value heads use. Ranks may share one.
    pub keys: Range<usize>,
    /// The value heads, none if there are more ranks than heads.
    pub values: Range<usize>,
}

impl GroupedHeads {
    /// The heads of one of `size` ranks: value heads as even as possible, the first ranks with one more.
    pub fn share(&self, size: usize, rank: usize) -> HeadShare {
        let group = self.num_value_heads / self.num_key_heads.max(1);
        let values = shard_range(self.num_value_heads, size, rank);
        let keys = match values.is_empty() {
            true => self.num_key_heads..self.num_key_heads,
            false => values.start / group..(values.end - 1) / group + 1,
        };
        HeadShare { keys, values }
    }
}

impl HeadShare {
    /// The place of each value head's key head among this rank's.
    pub fn v_to_k(&self, heads: GroupedHeads) -> Vec<usize> {
        let group = heads.num_value_heads / heads.num_key_heads.max(1);
        self.values.clone().map(|value| value / group - self.keys.start).collect()
    }
}

/// The kind of head that a tensor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HeadKind {
    /// Key heads; queries have as many.
    Key,
    /// Value heads.
    Value,
}

/// The dimension that an exchange gathers. The other one is sharded by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gathered {
    /// All heads of this rank's tokens.
    Heads,
    /// All tokens of this rank's heads.
    Tokens,
}

/// An exchange of tensors with the same tokens.
#[derive(Debug, Clone)]
pub struct ExchangedHeads<'a> {
    /// All heads.
    pub heads: GroupedHeads,
    /// Those of each tensor.
    pub kinds: &'a [HeadKind],
    /// Tokens of the whole sequence.
    pub seq_len: usize,
    /// The dimension that the exchange gathers.
    pub gathered: Gathered,
    /// Whether the tensors are gradients. Those of a key head that several ranks have are summed.
    pub is_backward: bool,
}

/// The ranks that share each sequence, between which tokens are exchanged for heads.
pub trait HeadExchange: Send + Sync {
    /// The heads of this rank.
    fn share(&self, heads: GroupedHeads) -> HeadShare;

    /// Exchanges the tensors in one collective, and recycles them.
    ///
    /// # Shapes
    /// `[batch, seq_local, heads, dim]` → `[batch, seq, heads_local, dim]`, or the inverse.
    ///
    /// # Errors
    /// Tensors of another shape, or failed communication.
    fn exchange(
        &self,
        tensors: Vec<Tensor>,
        exchanged: &ExchangedHeads<'_>,
        workspace: &Workspace,
    ) -> Result<Vec<Tensor>, LayerError>;
}

/// One rank, which has all tokens and all heads.
pub(super) struct WholeHeads;

impl HeadExchange for WholeHeads {
    fn share(&self, heads: GroupedHeads) -> HeadShare {
        heads.share(1, 0)
    }

    fn exchange(
        &self,
        tensors: Vec<Tensor>,
        _: &ExchangedHeads<'_>,
        _: &Workspace,
    ) -> Result<Vec<Tensor>, LayerError> {
        Ok(tensors)
    }
}
