//! What can be wrong with an attention call.

use crate::OpError;
use std::error::Error;

/// A failed attention call; the message says what would have been valid.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// Token positions are not strictly ascending.
    #[error(
        "{which} positions must ascend: position {position} at index {index} follows {previous}; sort the \
         shard's tokens by position"
    )]
    PositionsNotAscending {
        /// `"q"` or `"kv"`.
        which: &'static str,
        /// Index of the offending position.
        index: usize,
        /// The position before it.
        previous: u32,
        /// The offending position.
        position: u32,
    },
    /// A token lies behind the end of its row.
    #[error("{which} position {position} lies outside the row; valid positions are below {seq_len}")]
    PositionOutsideRow {
        /// `"q"` or `"kv"`.
        which: &'static str,
        /// The offending position.
        position: u32,
        /// Length of the rows.
        seq_len: u32,
    },
    /// There are no batch rows, so the length of a row is unknown.
    #[error("cu_seqlens has no rows; it needs one list of document boundaries per batch row")]
    NoRows,
    /// A row's document boundaries do not cover the row.
    #[error(
        "row {row}: document boundaries must start with 0, never decrease and end with {seq_len} (the length \
         of the first row), got {boundaries:?}"
    )]
    Boundaries {
        /// Batch row.
        row: usize,
        /// Length of the rows.
        seq_len: u32,
        /// What was given.
        boundaries: Vec<u32>,
    },
    /// A sliding window that not even the query itself fits in.
    #[error("a sliding window of 0 tokens sees nothing; use 1 or more, or None for no window")]
    EmptyWindow,
    /// A query head is mapped to a KV head that the tensors do not have.
    #[error(
        "{op}: query head {q_head} is mapped to KV head {kv_head}, but k and v have {num_kv_heads} heads \
         (valid are indices below that)"
    )]
    NoSuchKvHead {
        /// The operation.
        op: &'static str,
        /// Local query head.
        q_head: usize,
        /// The KV head it was mapped to.
        kv_head: usize,
        /// KV heads in `k` and `v`.
        num_kv_heads: usize,
    },
    /// A tensor has another shape than the other operands and the layout imply.
    #[error("{op}: {tensor} must have shape {expected:?}, got {got:?}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// Name of the tensor.
        tensor: &'static str,
        /// The shape that the other operands imply.
        expected: Vec<usize>,
        /// The tensor's shape.
        got: Vec<usize>,
    },
    /// A tensor is not one that kernels take, or they failed.
    #[error(transparent)]
    Op(#[from] OpError),
    /// candle refused a tensor operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// Another implementation of [`Attention`](super::Attention) failed, e.g. its communication did.
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
}

impl AttentionError {
    /// Wraps the error of an implementation that does more than compute.
    pub fn other(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Other(error.into())
    }
}
