//! Errors of attention calls.

use crate::OpError;
use std::error::Error;

/// A failed attention call; the message says what would be valid.
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
        /// Index of the wrong position.
        index: usize,
        /// The previous position.
        previous: u32,
        /// The wrong position.
        position: u32,
    },
    /// A token lies beyond the end of its sequence.
    #[error("{which} position {position} lies outside the sequence; valid positions are below {seq_len}")]
    PositionOutsideSequence {
        /// `"q"` or `"kv"`.
        which: &'static str,
        /// The wrong position.
        position: u32,
        /// Length of the sequences.
        seq_len: u32,
    },
    /// There are no sequences, so their length is unknown.
    #[error("cu_seqlens is empty; it needs one list of document boundaries per sequence")]
    NoSequences,
    /// The document boundaries do not cover their sequence.
    #[error(
        "sequence {sequence}: document boundaries must start with 0, never decrease and end with {seq_len} (the length \
         of the first sequence), got {boundaries:?}"
    )]
    Boundaries {
        /// Index of the sequence.
        sequence: usize,
        /// Length of the sequences.
        seq_len: u32,
        /// The given boundaries.
        boundaries: Vec<u32>,
    },
    /// A window or chunk of 0 excludes even the query itself.
    #[error("a window or chunk of 0 tokens sees nothing; use 1 or more, or None for neither")]
    EmptyWindow,
    /// A query head is mapped to a KV head that does not exist.
    #[error(
        "{op}: query head {q_head} is mapped to KV head {kv_head}, but k and v have {num_kv_heads} heads \
         (valid are indices below that)"
    )]
    NoSuchKvHead {
        /// The operation.
        op: &'static str,
        /// Local query head.
        q_head: usize,
        /// Its KV head.
        kv_head: usize,
        /// KV heads of `k` and `v`.
        num_kv_heads: usize,
    },
    /// The fused kernels are forced, and do not support the call.
    #[error(
        "{op}: there is no fused kernel for {found}; use a GPU, bf16 or f16, a head dimension of 64, 96 or 128, contiguous \
         tensors at offsets of a multiple of 16 bytes and a positive finite scale; or the tiled kernels"
    )]
    NotFused {
        /// The operation.
        op: &'static str,
        /// The property that is not supported.
        found: String,
    },
    /// The fused kernels could not be compared with the tiled ones. The GPU may be unusable until the process ends.
    #[error(
        "the comparison of the fused with the tiled attention kernels failed on this GPU; start the program again, and if \
         that does not help, use \"ulysses\": {{\"attention\": \"tiled\"}}, which compares nothing"
    )]
    SelfCheck {
        /// The cause.
        source: Box<AttentionError>,
    },
    /// A tensor's shape does not match the other operands and the layout.
    #[error("{op}: {tensor} must have shape {expected:?}, got {got:?}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// Name of the tensor.
        tensor: &'static str,
        /// Expected shape.
        expected: Vec<usize>,
        /// Actual shape.
        got: Vec<usize>,
    },
    /// A tensor is not supported, or a kernel failed.
    #[error(transparent)]
    Op(#[from] OpError),
    /// candle refused a tensor operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// Another implementation of [`Attention`](super::Attention) failed, for example its communication.
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
}

impl AttentionError {
    /// Wraps the error of another implementation.
    pub fn other(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Other(error.into())
    }
}
