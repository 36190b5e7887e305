//! The blocks of queries and keys that a backward task copies together.

use super::precision::{Form, gather_both, terms};
use super::tiles::{KEY_BLOCK, Rectangle, within};
use super::{Precision, Problem, Upstream};
use crate::attention::blocks::blocks;
use crate::matrix::{Mat, MatMut};
use std::ops::Range;

/// `q` and `dout` of a block of one query head, copied for matmuls over `head_dim`.
pub(super) struct QueryBlock<'a, T: Precision> {
    pub(super) queries: Range<usize>,
    q: Mat<'a, T::Tile>,
    dout: Mat<'a, T::Tile>,
}

/// The same, copied for matmuls over the queries.
pub(super) struct QueryTerms<'a, T: Precision> {
    q: Mat<'a, T::Tile>,
    dout: Mat<'a, T::Tile>,
}

impl<'a, T: Precision> QueryBlock<'a, T> {
    pub(super) fn gather(
        problem: &Problem<'_, T>,
        upstream: &Upstream<'_, T>,
        at: (usize, usize),
        queries: Range<usize>,
        [of_q, of_dout]: [&'a mut [f32]; 2],
    ) -> Self {
        let q = T::gather(&problem.q, at, &queries, Form::Rows, of_q);
        let dout = T::gather(&upstream.dout, at, &queries, Form::Rows, of_dout);
        Self { queries, q, dout }
    }

    pub(super) fn gather_both(
        problem: &Problem<'_, T>,
        upstream: &Upstream<'_, T>,
        at: (usize, usize),
        queries: Range<usize>,
        [of_q, of_dout]: [&'a mut [f32]; 2],
    ) -> (Self, QueryTerms<'a, T>) {
        let [q, q_terms] = gather_both::<T>(&problem.q, at, &queries, of_q);
        let [dout, dout_terms] = gather_both::<T>(&upstream.dout, at, &queries, of_dout);
        (Self { queries, q, dout }, QueryTerms { q: q_terms, dout: dout_terms })
    }

    /// The rectangle's rows of `q` and `dout`.
    pub(super) fn of(&self, rectangle: &Rectangle) -> [Mat<'a, T::Tile>; 2] {
        [self.q, self.dout].map(|matrix| matrix.rows(within(&rectangle.queries, &self.queries)))
    }
}

impl<'a, T: Precision> QueryTerms<'a, T> {
    /// The rectangle's queries, from the copies of their block.
    pub(super) fn of(&self, rectangle: &Rectangle, block: &QueryBlock<'_, T>) -> [Mat<'a, T::Tile>; 2] {
        let terms = terms::<T>(within(&rectangle.queries, &block.queries));
        [self.q, self.dout].map(|matrix| matrix.rows(terms.clone()))
    }
}

/// A block of keys of one KV head: for matmuls over the keys, and transposed for those over `head_dim`.
pub(super) struct KeyBlock<'a, T: Precision> {
    pub(super) keys: Range<usize>,
    k: Mat<'a, T::Tile>,
    k_t: Mat<'a, T::Tile>,
    v_t: Mat<'a, T::Tile>,
}

impl<'a, T: Precision> KeyBlock<'a, T> {
    pub(super) fn gather(
        problem: &Problem<'_, T>,
        at: (usize, usize),
        keys: Range<usize>,
        [of_k, of_k_t, of_v_t]: [&'a mut [f32]; 3],
    ) -> Self {
        let Problem { k, v, .. } = problem;
        let k_t = T::gather(k, at, &keys, Form::Transposed, of_k_t);
        let v_t = T::gather(v, at, &keys, Form::Transposed, of_v_t);
        Self { k: T::gather(k, at, &keys, Form::TokenTerms, of_k), k_t, v_t, keys }
    }

    /// The rectangle's keys, for matmuls over the keys.
    pub(super) fn terms_of(&self, rectangle: &Rectangle) -> Mat<'a, T::Tile> {
        self.k.rows(terms::<T>(within(&rectangle.keys, &self.keys)))
    }

    /// The rectangle's columns of the transposed `k` and `v`.
    pub(super) fn transposed_of(&self, rectangle: &Rectangle) -> [Mat<'a, T::Tile>; 2] {
        [self.k_t, self.v_t].map(|matrix| matrix.columns(within(&rectangle.keys, &self.keys)))
    }

    /// The rows of the block's gradient for the rectangle's keys.
    pub(super) fn rows_of<'g>(&self, rectangle: &Rectangle, gradient: &'g mut [f32]) -> MatMut<'g> {
        let head_dim = self.k.num_cols();
        let rows = &mut gradient[within(&rectangle.keys, &self.keys).start * head_dim..];
        MatMut::new(rows, rectangle.keys.len(), head_dim, head_dim)
    }
}

/// A block of keys, and the buffers for its gradients `dk` and `dv`.
pub(super) type WithGradients<'a, T> = (KeyBlock<'a, T>, [&'a mut [f32]; 2]);

/// Copies each block of `keys` and pairs it with its part of the gradients.
pub(super) fn gather_blocks<'a, T: Precision>(
    problem: &Problem<'_, T>,
    at: (usize, usize),
    keys: &Range<usize>,
    [of_k, of_k_t, of_v_t]: [&'a mut [f32]; 3],
    [dk, dv]: [&'a mut [f32]; 2],
) -> Vec<WithGradients<'a, T>> {
    let head_dim = problem.dims.head_dim;
    let [dk, dv] = [dk, dv].map(|buffer| buffer.chunks_mut(KEY_BLOCK * head_dim));
    let [of_k_t, of_v_t] =
        [of_k_t, of_v_t].map(|buffer| buffer.chunks_mut(T::scratch(Form::Transposed, KEY_BLOCK, head_dim)));
    let of_k = of_k.chunks_mut(T::scratch(Form::TokenTerms, KEY_BLOCK, head_dim));
    let buffers = of_k.zip(of_k_t).zip(of_v_t).zip(dk.zip(dv));
    let blocks = blocks(keys.clone(), keys.end, KEY_BLOCK).zip(buffers);
    let gather = |(keys, (((of_k, of_k_t), of_v_t), (dk, dv)))| {
        (KeyBlock::gather(problem, at, keys, [of_k, of_k_t, of_v_t]), [dk, dv])
    };
    blocks.map(gather).collect()
}
