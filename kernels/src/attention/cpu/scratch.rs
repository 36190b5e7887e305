//! Scratch memory that each thread keeps between calls.

use super::precision::{Form, Precision, both_scratch, both_tiles_scratch};
use super::softmax::{ROW_STRIDE, SUMS};
use super::tiles::{KEY_BLOCK, QUERY_BLOCK, cached_tokens};
use crate::scratch::{self, Scratch, total};

thread_local! {
    static SCRATCH: Scratch = const { Scratch::new(Vec::new()) };
}

/// [`scratch::with_scratch`] with attention's buffers.
pub(super) fn with_scratch<const N: usize, R>(
    lengths: [usize; N],
    work: impl FnOnce([&mut [f32]; N]) -> R,
) -> R {
    scratch::with_scratch(&SCRATCH, lengths, work)
}

/// Maximum bytes of the buffers of a pass over sequences of `num_tokens` tokens. A backward pass in two
/// sweeps needs only those of a block of keys.
pub(in crate::attention) fn scratch_bytes<T: Precision>(
    num_tokens: usize,
    head_dim: usize,
    backward: bool,
) -> usize {
    let elements = if backward {
        total(keys_lengths::<T>(num_tokens, head_dim))
    } else {
        total(queries_lengths::<T>(num_tokens, head_dim))
    };
    elements * size_of::<f32>() + T::packed_bytes(T::STRIP.max(T::BACKWARD_STRIP), KEY_BLOCK, head_dim)
}

/// Lengths of the buffers of a forward task of up to `num_queries` queries: scores, their conversion,
/// queries, transposed keys, values, output, maxima and sums.
pub(super) fn queries_lengths<T: Precision>(num_queries: usize, head_dim: usize) -> [usize; 8] {
    let rows = num_queries.min(cached_tokens(QUERY_BLOCK, head_dim));
    let strip = rows.min(T::STRIP);
    let (tile, buffer) = (strip * ROW_STRIDE, T::tile_scratch(strip));
    let (of_queries, of_keys) =
        (T::scratch(Form::Rows, rows, head_dim), T::scratch(Form::TokenTerms, KEY_BLOCK, head_dim));
    let (columns, output) = (T::scratch(Form::Transposed, KEY_BLOCK, head_dim), rows * head_dim);
    [tile, buffer, of_queries, columns, of_keys, output, rows, rows * SUMS]
}

/// Lengths of the buffers of a backward task of up to `num_keys` keys: two tiles and their conversions; keys;
/// transposed keys and values; queries and the output's gradient; the gradients of keys and values.
pub(super) fn keys_lengths<T: Precision>(num_keys: usize, head_dim: usize) -> [usize; 11] {
    let keys = num_keys.min(cached_tokens(KEY_BLOCK, head_dim));
    let tile = T::BACKWARD_STRIP * ROW_STRIDE;
    let (buffer, buffers) = (T::tile_scratch(T::BACKWARD_STRIP), both_tiles_scratch::<T>(T::BACKWARD_STRIP));
    let (of_keys, of_queries) =
        (T::scratch(Form::TokenTerms, keys, head_dim), both_scratch::<T>(QUERY_BLOCK, head_dim));
    let columns = keys.div_ceil(KEY_BLOCK) * T::scratch(Form::Transposed, KEY_BLOCK, head_dim);
    let gradient = keys * head_dim;
    [tile, tile, buffer, buffers, of_keys, columns, columns, of_queries, of_queries, gradient, gradient]
}

/// As [`keys_lengths`], for a task that computes only the gradient of `queries` queries.
pub(super) fn dq_lengths<T: Precision>(queries: usize, head_dim: usize) -> [usize; 8] {
    let tile = T::BACKWARD_STRIP * ROW_STRIDE;
    let (buffer, columns) =
        (T::tile_scratch(T::BACKWARD_STRIP), T::scratch(Form::Transposed, KEY_BLOCK, head_dim));
    let (of_keys, of_queries) =
        (T::scratch(Form::TokenTerms, KEY_BLOCK, head_dim), T::scratch(Form::Rows, queries, head_dim));
    [tile, tile, buffer, of_keys, columns, columns, of_queries, of_queries]
}
