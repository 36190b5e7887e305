//! An attention call in steps, so that its communication can overlap with other work.
//!
//! [`Attention::start_forward`](super::Attention::start_forward) and its siblings send the operands and return
//! the second step as a closure. That step waits for the operands, computes, and starts to return the results
//! ([`Returning`]). An attention without communication computes in the second step.

use super::{AttentionError, SavedAttention};
use candle_core::Tensor;

/// The second step of a call: takes `Input`, which the caller had no use for earlier.
pub type Attend<'a, Input, Output> = Box<dyn FnOnce(Input) -> Result<Output, AttentionError> + 'a>;

/// A started [`Attention::forward`](super::Attention::forward). The saved state is complete once it has run,
/// before the output has returned.
pub type StartedForward<'a> = Attend<'a, (), (SavedAttention, Returning<'a, Tensor>)>;

/// A started [`Attention::backward`](super::Attention::backward).
pub type StartedBackward<'a> = Attend<'a, SavedAttention, Returning<'a, QkvGradients>>;

/// A started [`Attention::backward_recomputed`](super::Attention::backward_recomputed).
pub type StartedRecomputed<'a> = Attend<'a, (), Returning<'a, QkvGradients>>;

/// The gradients of queries, keys and values, in their shapes.
#[derive(Debug)]
pub struct QkvGradients {
    /// Of the queries.
    pub dq: Tensor,
    /// Of the keys.
    pub dk: Tensor,
    /// Of the values.
    pub dv: Tensor,
}

/// Results of attention on their way to the ranks that own their tokens.
#[must_use = "the results are valid only after `wait`"]
pub enum Returning<'a, T> {
    /// They are here: the attention does not communicate.
    Ready(T),
    /// They arrive when this is called.
    UnderWay(Box<dyn FnOnce() -> Result<T, AttentionError> + 'a>),
}

impl<T> Returning<'_, T> {
    /// Waits for the results.
    ///
    /// # Errors
    /// Failed communication.
    pub fn wait(self) -> Result<T, AttentionError> {
        match self {
            Self::Ready(results) => Ok(results),
            Self::UnderWay(wait) => wait(),
        }
    }
}
