//! Working memory that each thread keeps between calls.

use super::operand::Operand;
use super::softmax::ROW_STRIDE;
use super::tiles::{KEY_BLOCK, QUERY_BLOCK};
use std::cell::RefCell;

/// Elements in a cache line, to which the memory is aligned.
const ALIGNMENT: usize = 16;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Elements that buffers of the given lengths take together.
fn total<const N: usize>(lengths: [usize; N]) -> usize {
    lengths.iter().map(|length| length.next_multiple_of(ALIGNMENT)).sum::<usize>() + ALIGNMENT
}

/// The buffers of a pass over rows of `num_tokens` tokens, in bytes.
pub(in crate::ops::attention) fn scratch_bytes<T: Operand>(
    num_tokens: usize,
    head_dim: usize,
    backward: bool,
) -> usize {
    let elements = if backward {
        total(key_block_lengths::<T>(num_tokens.min(KEY_BLOCK), head_dim))
    } else {
        total(query_block_lengths::<T>(num_tokens.min(QUERY_BLOCK), head_dim))
    };
    elements * size_of::<f32>() + T::packed_bytes(QUERY_BLOCK, KEY_BLOCK, head_dim)
}

/// Lengths of the buffers of a forward task of `rows` queries: scores, what they are converted to, keys, output,
/// largest logits and sums.
pub(super) fn query_block_lengths<T: Operand>(rows: usize, head_dim: usize) -> [usize; 6] {
    let tile = rows * ROW_STRIDE;
    [tile, T::room_for_tile(tile), KEY_BLOCK * head_dim, rows * head_dim, rows, rows]
}

/// Lengths of the buffers of a backward task of `keys` keys: two tiles and what they are converted to, and keys,
/// values and their gradients.
pub(super) fn key_block_lengths<T: Operand>(keys: usize, head_dim: usize) -> [usize; 8] {
    let (tile, block) = (QUERY_BLOCK * ROW_STRIDE, keys * head_dim);
    let room = T::room_for_tile(tile);
    [tile, tile, room, room, block, block, block, block]
}

/// Calls `work` with `N` buffers of the given lengths, each aligned to a cache line, contents undefined.
///
/// `work` must not come back here on the same thread, so it must not wait for the thread pool.
pub(super) fn with_scratch<const N: usize, R>(
    lengths: [usize; N],
    work: impl FnOnce([&mut [f32]; N]) -> R,
) -> R {
    let total = total(lengths);
    let lengths = lengths.map(|length| length.next_multiple_of(ALIGNMENT));
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < total {
            *scratch = vec![0.0; total];
        }
        let offset = scratch.as_ptr().align_offset(ALIGNMENT * size_of::<f32>());
        let mut rest = &mut scratch[offset..];
        work(lengths.map(|length| rest.split_off_mut(..length).unwrap_or_default()))
    })
}
