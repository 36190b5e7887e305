//! The tokens of an attention layout.

use super::SequenceParallelError;
use crate::mesh::TokenRanges;
use std::sync::Arc;
use ulysses_kernels::attention::AttentionLayout;
use ulysses_kernels::device::dry;

/// Number of tokens in a whole sequence.
pub(super) fn seq_len(layout: &AttentionLayout) -> usize {
    layout.cu_seqlens().first().and_then(|row| row.last()).map_or(0, |&end| end as usize)
}

/// A rank of a group.
pub(super) struct Member {
    pub(super) rank: usize,
    pub(super) group_size: usize,
}

/// Checks that queries and keys are the `expected` tokens of a rank.
pub(super) fn check_shard(
    layout: &AttentionLayout,
    expected: &TokenRanges,
    Member { rank, group_size }: Member,
) -> Result<(), SequenceParallelError> {
    // A dry run has no positions.
    for positions in [layout.q_positions(), layout.kv_positions()].into_iter().filter(|_| !dry::is_dry()) {
        if !positions.iter().map(|&position| position as usize).eq(expected.positions()) {
            let got = positions.first().copied().zip(positions.last().copied());
            let (seq_len, expected) = (seq_len(layout), expected.clone());
            return Err(SequenceParallelError::Shard { rank, group_size, seq_len, expected, got });
        }
    }
    Ok(())
}

/// Returns whether two layouts share their tokens, judged by shared pointers.
pub(super) fn shares_tokens(a: &AttentionLayout, b: &AttentionLayout) -> bool {
    Arc::ptr_eq(a.q_positions(), b.q_positions())
        && Arc::ptr_eq(a.kv_positions(), b.kv_positions())
        && Arc::ptr_eq(a.documents(), b.documents())
}

/// Returns whether two layouts also share the window, and the chunks of the documents.
pub(super) fn shares_mask(a: &AttentionLayout, b: &AttentionLayout) -> bool {
    shares_tokens(a, b) && Arc::ptr_eq(a.cu_seqlens(), b.cu_seqlens()) && a.window() == b.window()
}

/// Returns whether two layouts are equal, judged by shared pointers.
pub(super) fn is_same(a: &AttentionLayout, b: &AttentionLayout) -> bool {
    shares_mask(a, b) && a.logits() == b.logits() && Arc::ptr_eq(a.q_to_kv(), b.q_to_kv())
}
