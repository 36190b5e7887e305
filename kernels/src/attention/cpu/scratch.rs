//! Scratch memory that each thread keeps between calls.

use super::precision::{Form, Precision};
use super::softmax::SUMS;
use super::tiles::{KEY_BLOCK, QUERY_BLOCK, ROW_STRIDE, cached_tokens};
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

/// Declares the buffers of a task, `$name<&mut [f32]>`, and their lengths, `$name<usize>`.
macro_rules! buffers {
    ($(#[$doc:meta])* $name:ident { $($(#[$of_field:meta])* $field:ident,)+ }) => {
        $(#[$doc])*
        #[derive(Default)]
        pub(super) struct $name<B> {
            $($(#[$of_field])* pub(super) $field: B,)+
        }

        impl $name<usize> {
            /// Calls `work` with buffers of these lengths, with unspecified content.
            pub(super) fn with<R>(self, work: impl FnOnce($name<&mut [f32]>) -> R) -> R {
                with_scratch([$(self.$field),+], |[$($field),+]| work($name { $($field),+ }))
            }

            fn total(self) -> usize {
                total([$(self.$field),+])
            }
        }
    };
}

buffers! {
    /// The buffers of a forward task.
    ForwardScratch {
        /// A strip of scores, then of probabilities.
        scores,
        /// The probabilities as an operand.
        p,
        /// The queries.
        q,
        /// A block of transposed keys.
        k_t,
        /// The values of these keys.
        v,
        /// See [`Running`](super::softmax::Running).
        output,
        /// See [`Running`](super::softmax::Running).
        max,
        /// See [`Running`](super::softmax::Running).
        sums,
    }
}

buffers! {
    /// The buffers of a backward task.
    BackwardScratch {
        /// A strip of scores, then of probabilities.
        p,
        /// The gradients of the scores.
        ds,
        /// `p` as an operand: transposed, for the gradient of values.
        p_t,
        /// `ds` as an operand: transposed, for the gradient of keys.
        ds_t,
        /// `ds` as an operand for the gradient of queries.
        ds_rows,
        /// Keys for matmuls over the keys; see [`KeyBlock`](super::gathered::KeyBlock).
        k,
        /// Keys, transposed for matmuls over `head_dim`.
        k_t,
        /// Values, likewise.
        v_t,
        /// Sums of the gradient of keys.
        dk,
        /// Sums of the gradient of values.
        dv,
        /// A block of queries for matmuls over `head_dim`; see [`QueryBlock`](super::gathered::QueryBlock).
        q,
        /// The output's gradient, likewise.
        dout,
        /// Queries for matmuls over the queries, if these need another copy.
        q_terms,
        /// The output's gradient, likewise.
        dout_terms,
    }
}

/// Maximum bytes of the buffers of a pass over sequences of `num_tokens` tokens. A backward pass in two
/// sweeps needs only those of a block of keys.
pub(in crate::attention) fn scratch_bytes<T: Precision>(
    num_tokens: usize,
    head_dim: usize,
    backward: bool,
) -> usize {
    let elements = if backward {
        BackwardScratch::for_keys::<T>(num_tokens, head_dim).total()
    } else {
        ForwardScratch::for_queries::<T>(num_tokens, head_dim).total()
    };
    elements * size_of::<f32>() + T::packed_bytes(T::STRIP.max(T::BACKWARD_STRIP), KEY_BLOCK, head_dim)
}

impl ForwardScratch<usize> {
    /// Lengths for up to `num_queries` queries.
    pub(super) fn for_queries<T: Precision>(num_queries: usize, head_dim: usize) -> Self {
        let rows = num_queries.min(cached_tokens(QUERY_BLOCK, head_dim));
        let strip = rows.min(T::STRIP);
        Self {
            scores: strip * ROW_STRIDE,
            p: T::tile_scratch(strip),
            q: T::scratch(Form::Rows, rows, head_dim),
            k_t: T::scratch(Form::Transposed, KEY_BLOCK, head_dim),
            v: T::scratch(Form::TokenTerms, KEY_BLOCK, head_dim),
            output: rows * head_dim,
            max: rows,
            sums: rows * SUMS,
        }
    }
}

impl BackwardScratch<usize> {
    /// Lengths for the gradients of up to `num_keys` keys and their values, and maybe of queries.
    pub(super) fn for_keys<T: Precision>(num_keys: usize, head_dim: usize) -> Self {
        let keys = num_keys.min(cached_tokens(KEY_BLOCK, head_dim));
        let columns = keys.div_ceil(KEY_BLOCK) * T::scratch(Form::Transposed, KEY_BLOCK, head_dim);
        let (tile, queries) = (T::tile_scratch(T::BACKWARD_STRIP), QUERY_BLOCK);
        // With one term per element, a copy serves both kinds of matmuls.
        let second = |scratch| if T::TERMS == 1 { 0 } else { scratch };
        let terms = second(T::scratch(Form::TokenTerms, queries, head_dim));
        Self {
            p_t: tile,
            ds_t: tile,
            ds_rows: second(tile),
            k: T::scratch(Form::TokenTerms, keys, head_dim),
            k_t: columns,
            v_t: columns,
            dk: keys * head_dim,
            dv: keys * head_dim,
            q_terms: terms,
            dout_terms: terms,
            ..Self::for_queries::<T>(queries, head_dim)
        }
    }

    /// Lengths for the gradient of `num_queries` queries alone.
    pub(super) fn for_queries<T: Precision>(num_queries: usize, head_dim: usize) -> Self {
        let columns = T::scratch(Form::Transposed, KEY_BLOCK, head_dim);
        let rows = T::scratch(Form::Rows, num_queries, head_dim);
        Self {
            p: T::BACKWARD_STRIP * ROW_STRIDE,
            ds: T::BACKWARD_STRIP * ROW_STRIDE,
            ds_rows: T::tile_scratch(T::BACKWARD_STRIP),
            k: T::scratch(Form::TokenTerms, KEY_BLOCK, head_dim),
            k_t: columns,
            v_t: columns,
            q: rows,
            dout: rows,
            ..Self::default()
        }
    }
}
