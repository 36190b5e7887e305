//! The exchange of tokens for heads around a module that reads whole sequences.

use super::{HeadRanges, LayerError, NumHeads};
use candle_core::Tensor;
use ulysses_kernels::Workspace;

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

/// The tensors of an exchange around a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadTransfer {
    /// The module's inputs, to the ranks with their heads.
    Inputs,
    /// Its output, back to the ranks with its tokens.
    Output,
    /// The gradient of the output, to the ranks with its heads.
    OutputGradient,
    /// The gradients of the inputs, back to the ranks with their tokens. Those of a key head that several ranks have are summed.
    InputGradients,
}

impl HeadTransfer {
    /// The dimension that the exchange gathers.
    pub fn gathered(self) -> Gathered {
        match self {
            Self::Inputs | Self::OutputGradient => Gathered::Tokens,
            Self::Output | Self::InputGradients => Gathered::Heads,
        }
    }

    /// Whether the tensors are gradients.
    pub fn is_backward(self) -> bool {
        matches!(self, Self::OutputGradient | Self::InputGradients)
    }
}

/// An exchange of tensors with the same tokens.
#[derive(Debug, Clone)]
pub struct ExchangedHeads<'a> {
    /// All heads.
    pub heads: NumHeads,
    /// Those of each tensor.
    pub kinds: &'a [HeadKind],
    /// Tokens of the whole sequence.
    pub seq_len: usize,
    /// Inputs or outputs of the module, or their gradients.
    pub transfer: HeadTransfer,
}

/// The ranks that share each sequence, between which tokens are exchanged for heads.
pub trait HeadExchange: Send + Sync {
    /// The heads of this rank.
    fn share(&self, heads: NumHeads) -> HeadRanges;

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
    fn share(&self, heads: NumHeads) -> HeadRanges {
        heads.on_sp_rank(1, 0)
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
