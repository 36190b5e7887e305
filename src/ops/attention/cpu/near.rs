//! The blocks of queries and keys that a backward task copies together.

use super::backward::Upstream;
use super::matrix::{Mat, MatMut};
use super::softmax::ROW_STRIDE;
use super::tiles::{KEY_BLOCK, Span, within};
use super::{Operand, Problem};
use crate::ops::attention::blocks::blocks;
use std::ops::Range;

/// A block of one query head: `[queries, head_dim]`.
pub(super) struct QueryBlock<'a, T: Operand> {
    pub(super) queries: Range<usize>,
    q: Mat<'a, T::Tile>,
    dout: Mat<'a, T::Tile>,
}

impl<'a, T: Operand> QueryBlock<'a, T> {
    pub(super) fn gather(
        problem: &Problem<'_, T>,
        upstream: &Upstream<'_, T>,
        (row, head): (usize, usize),
        queries: Range<usize>,
        [of_q, of_dout]: [&'a mut [f32]; 2],
    ) -> Self {
        let q = T::gather(&problem.q, row, head, &queries, of_q);
        let dout = T::gather(&upstream.dout, row, head, &queries, of_dout);
        Self { queries, q, dout }
    }

    /// The rectangle's rows of `q` and `dout`.
    pub(super) fn of(&self, span: &Span) -> [Mat<'a, T::Tile>; 2] {
        [self.q, self.dout].map(|matrix| matrix.rows(within(&span.queries, &self.queries)))
    }
}

/// A block of one KV head: `[keys, head_dim]`, and transposed for the products that sum over it.
pub(super) struct KeyBlock<'a, T: Operand> {
    pub(super) keys: Range<usize>,
    k: Mat<'a, T::Tile>,
    k_t: Mat<'a, T::Tile>,
    v_t: Mat<'a, T::Tile>,
}

impl<'a, T: Operand> KeyBlock<'a, T> {
    pub(super) fn gather(
        problem: &Problem<'_, T>,
        (row, kv_head): (usize, usize),
        keys: Range<usize>,
        [of_k, of_k_t, of_v_t]: [&'a mut [f32]; 3],
    ) -> Self {
        let Problem { k, v, .. } = problem;
        let k_t = T::gather_transposed(k, row, kv_head, &keys, of_k_t);
        let v_t = T::gather_transposed(v, row, kv_head, &keys, of_v_t);
        Self { k: T::gather(k, row, kv_head, &keys, of_k), k_t, v_t, keys }
    }

    /// The rectangle's rows of `k`.
    pub(super) fn of(&self, span: &Span) -> Mat<'a, T::Tile> {
        self.k.rows(within(&span.keys, &self.keys))
    }

    /// The rectangle's columns of the transposed `k` and `v`.
    pub(super) fn transposed_of(&self, span: &Span) -> [Mat<'a, T::Tile>; 2] {
        [self.k_t, self.v_t].map(|matrix| matrix.columns(within(&span.keys, &self.keys)))
    }

    /// The rows of the block's gradient that belong to the rectangle's keys.
    pub(super) fn rows_of<'g>(&self, span: &Span, gradient: &'g mut [f32]) -> MatMut<'g> {
        let head_dim = self.k.num_cols();
        let rows = &mut gradient[within(&span.keys, &self.keys).start * head_dim..];
        MatMut::new(rows, span.keys.len(), head_dim, head_dim)
    }
}

/// A block of keys, and where its gradients `dk` and `dv` are summed.
pub(super) type WithGradients<'a, T> = (KeyBlock<'a, T>, [&'a mut [f32]; 2]);

/// Each block of `keys`, with its part of the gradients.
pub(super) fn gather_blocks<'a, T: Operand>(
    problem: &Problem<'_, T>,
    (row, kv_head): (usize, usize),
    keys: &Range<usize>,
    [of_k, of_k_t, of_v_t]: [&'a mut [f32]; 3],
    [dk, dv]: [&'a mut [f32]; 2],
) -> Vec<WithGradients<'a, T>> {
    let head_dim = problem.dims.head_dim;
    let [of_k, dk, dv] = [of_k, dk, dv].map(|buffer| buffer.chunks_mut(KEY_BLOCK * head_dim));
    let [of_k_t, of_v_t] = [of_k_t, of_v_t].map(|buffer| buffer.chunks_mut(ROW_STRIDE * head_dim));
    let buffers = of_k.zip(of_k_t).zip(of_v_t).zip(dk.zip(dv));
    let blocks = blocks(keys.clone(), keys.end, KEY_BLOCK).zip(buffers);
    let gather = |(keys, (((of_k, of_k_t), of_v_t), (dk, dv)))| {
        (KeyBlock::gather(problem, (row, kv_head), keys, [of_k, of_k_t, of_v_t]), [dk, dv])
    };
    blocks.map(gather).collect()
}
