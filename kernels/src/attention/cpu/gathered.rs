//! The blocks of queries and keys that a backward task copies together.

use super::precision::{Form, Precision};
use super::scratch::BackwardScratch;
use super::{Problem, Upstream};
use crate::matrix::{HeadAt, Mat};
use std::ops::Range;

/// `q` and `dout` of a block of one query head, copied for matmuls over `head_dim`.
pub(super) struct QueryBlock<'a, T: Precision> {
    pub(super) at: HeadAt,
    pub(super) range: Range<usize>,
    pub(super) q: Mat<'a, T::Operand>,
    pub(super) dout: Mat<'a, T::Operand>,
}

/// The same, copied for matmuls over the queries.
pub(super) struct QueryTerms<'a, T: Precision> {
    pub(super) q: Mat<'a, T::Operand>,
    pub(super) dout: Mat<'a, T::Operand>,
}

impl<'a, T: Precision> QueryBlock<'a, T> {
    pub(super) fn gather(
        problem: &Problem<'_, T>,
        upstream: &Upstream<'_, T>,
        at: HeadAt,
        queries: Range<usize>,
        q: &'a mut [f32],
        dout: &'a mut [f32],
    ) -> Self {
        let q = T::gather(problem.q.head(at, &queries), Form::Rows, q);
        let dout = T::gather(upstream.dout.head(at, &queries), Form::Rows, dout);
        Self { at, range: queries, q, dout }
    }

    pub(super) fn gather_terms(
        &self,
        problem: &Problem<'_, T>,
        upstream: &Upstream<'_, T>,
        q: &'a mut [f32],
        dout: &'a mut [f32],
    ) -> QueryTerms<'a, T> {
        let Self { at, range, .. } = self;
        let q = T::gather_terms(problem.q.head(*at, range), self.q, q);
        QueryTerms { q, dout: T::gather_terms(upstream.dout.head(*at, range), self.dout, dout) }
    }
}

/// A block of keys of one KV head: for matmuls over the keys, and transposed for those over `head_dim`.
pub(super) struct KeyBlock<'a, T: Precision> {
    pub(super) range: Range<usize>,
    pub(super) k: Mat<'a, T::Operand>,
    pub(super) k_t: Mat<'a, T::Operand>,
    pub(super) v_t: Mat<'a, T::Operand>,
}

impl<'a, T: Precision> KeyBlock<'a, T> {
    pub(super) fn gather(
        problem: &Problem<'_, T>,
        at: HeadAt,
        keys: Range<usize>,
        k: &'a mut [f32],
        k_t: &'a mut [f32],
        v_t: &'a mut [f32],
    ) -> Self {
        let rows = problem.k.head(at, &keys);
        let k_t = T::gather(rows, Form::Transposed, k_t);
        let v_t = T::gather(problem.v.head(at, &keys), Form::Transposed, v_t);
        Self { k: T::gather(rows, Form::TokenTerms, k), k_t, v_t, range: keys }
    }
}

/// A block of keys, and the sums of its gradients so far, `[keys, head_dim]`.
pub(super) struct SummedKeys<'a, T: Precision> {
    pub(super) block: KeyBlock<'a, T>,
    pub(super) dk: &'a mut [f32],
    pub(super) dv: &'a mut [f32],
}

impl<'a, T: Precision> SummedKeys<'a, T> {
    /// Copies a block to the front of the scratch for keys, which becomes shorter by it.
    pub(super) fn gather(
        problem: &Problem<'_, T>,
        at: HeadAt,
        keys: Range<usize>,
        scratch: &mut BackwardScratch<&'a mut [f32]>,
    ) -> Self {
        let take = |memory: &mut &'a mut [f32], len| {
            let (head, rest) = std::mem::take(memory).split_at_mut(len);
            *memory = rest;
            head
        };
        let (num_keys, head_dim) = (keys.len(), problem.dims.head_dim);
        let columns = T::scratch(Form::Transposed, num_keys, head_dim);
        let k = take(&mut scratch.k, T::scratch(Form::TokenTerms, num_keys, head_dim));
        let (k_t, v_t) = (take(&mut scratch.k_t, columns), take(&mut scratch.v_t, columns));
        let block = KeyBlock::gather(problem, at, keys, k, k_t, v_t);
        let [dk, dv] = [&mut scratch.dk, &mut scratch.dv].map(|sums| take(sums, num_keys * head_dim));
        dk.fill(0.0);
        dv.fill(0.0);
        Self { block, dk, dv }
    }
}
