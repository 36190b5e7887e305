//! Backward: recomputes the probabilities from the log-denominators, rectangle by rectangle.
//!
//! `p = exp(scale q k^T - lse)`, `ds = p * (dout v^T - delta)`, then `dv += p^T dout`, `dk += scale ds^T q` and
//! `dq += scale ds k`.

use super::{
    Operand, Problem, Upstream,
    gathered::{KeyBlock, QueryBlock, QueryTerms, gather_blocks},
    matrix::{HeadsMut, Mat, MatMut, Store},
    scratch::{dq_lengths, keys_lengths, with_scratch},
    softmax::{ROW_STRIDE, RowTerms, softmax_backward},
    tiles::{KEY_BLOCK, QUERY_BLOCK, Span, begin_at_multiples, near_tokens, spans, strips},
};
use crate::attention::blocks::blocks;
use crate::cast::Float;
use rayon::prelude::*;
use std::ops::Range;

/// Where backward writes.
pub(in crate::attention) struct Gradients<'a, E> {
    /// `[b, sq, hq, d]`. In f32, because every block of keys adds to it.
    pub(in crate::attention) dq: &'a mut [f32],
    /// `[b, skv, hkv, d]`
    pub(in crate::attention) dk: &'a mut [E],
    /// `[b, skv, hkv, d]`
    pub(in crate::attention) dv: &'a mut [E],
}

/// Writes the gradients, with the same bits whichever of the two ways is taken.
///
/// One task per (batch row, KV head) does everything in five products per rectangle. Where there are too few
/// of those for the threads, one task per (batch row, KV head, block of keys) makes `dk` and `dv`, and then
/// one per (batch row, query head, block of queries) makes `dq`: seven products, since the scores and their
/// gradients are computed twice, but as many tasks as there are blocks. Both add up the same rectangles in the
/// same order.
pub(in crate::attention) fn backward<T: Operand>(
    problem: &Problem<'_, T>,
    upstream: &Upstream<'_, T>,
    gradients: Gradients<'_, T::Element>,
) {
    let dims = &problem.dims;
    if dims.num_queries == 0 || dims.num_keys == 0 {
        clear(gradients.dq);
        return [gradients.dk, gradients.dv].into_iter().for_each(clear);
    }
    let pass = Pass {
        problem,
        upstream,
        dq: HeadsMut::new(gradients.dq, dims.num_queries, dims.num_heads, dims.head_dim),
        dk: HeadsMut::new(gradients.dk, dims.num_keys, dims.num_kv_heads, dims.head_dim),
        dv: HeadsMut::new(gradients.dv, dims.num_keys, dims.num_kv_heads, dims.head_dim),
    };
    let num_tasks = dims.batch * dims.num_kv_heads;
    if one_task_per_kv_head(num_tasks, rayon::current_num_threads()) {
        (0..num_tasks).into_par_iter().for_each(|index| {
            pass.kv_head(index / dims.num_kv_heads, index % dims.num_kv_heads);
        });
    } else {
        pass.in_two_sweeps();
    }
}

fn clear<E: Float>(gradient: &mut [E]) {
    gradient.fill(E::zero());
}

/// Whether the share of the threads that whole KV heads keep busy outweighs the two extra products of seven.
fn one_task_per_kv_head(num_tasks: usize, num_threads: usize) -> bool {
    7 * num_tasks >= 5 * num_threads * num_tasks.div_ceil(num_threads)
}

struct Pass<'a, T: Operand> {
    problem: &'a Problem<'a, T>,
    upstream: &'a Upstream<'a, T>,
    dq: HeadsMut<'a>,
    dk: HeadsMut<'a, T::Element>,
    dv: HeadsMut<'a, T::Element>,
}

impl<T: Operand> Pass<'_, T> {
    /// All gradients of one KV head and the query heads that use it.
    fn kv_head(&self, row: usize, kv_head: usize) {
        let dims = &self.problem.dims;
        for head in self.query_heads(kv_head) {
            // SAFETY: a query head has one KV head and is only touched by that head's task.
            unsafe { self.dq.head((row, head), &(0..dims.num_queries)) }.fill(0.0);
        }
        for keys in blocks(0..dims.num_keys, dims.num_keys, near_tokens(KEY_BLOCK, dims.head_dim)) {
            self.keys(row, kv_head, keys, true);
        }
    }

    fn in_two_sweeps(&self) {
        let dims = &self.problem.dims;
        let key_blocks = dims.num_keys.div_ceil(KEY_BLOCK);
        (0..dims.batch * dims.num_kv_heads * key_blocks).into_par_iter().for_each(|index| {
            let (head, block) = (index / key_blocks, index % key_blocks);
            let keys = block * KEY_BLOCK..dims.num_keys.min((block + 1) * KEY_BLOCK);
            self.keys(head / dims.num_kv_heads, head % dims.num_kv_heads, keys, false);
        });
        let query_blocks = dims.num_queries.div_ceil(QUERY_BLOCK);
        (0..dims.batch * dims.num_heads * query_blocks).into_par_iter().for_each(|index| {
            let (head, block) = (index / query_blocks, index % query_blocks);
            let queries = block * QUERY_BLOCK..dims.num_queries.min((block + 1) * QUERY_BLOCK);
            self.query_block(head / dims.num_heads, head % dims.num_heads, queries);
        });
    }

    /// `dk` and `dv` of some blocks of keys and, if asked for, what they add to `dq`. Queries are fetched once for all
    /// of the blocks, whose rectangles are those of one block alone.
    fn keys(&self, row: usize, kv_head: usize, keys: Range<usize>, add_to_dq: bool) {
        let Problem { dims, layout, .. } = *self.problem;
        let visible = layout.visible(row);
        let lengths = keys_lengths::<T>(keys.len(), dims.head_dim);
        with_scratch(lengths, |[p, ds, p_room, ds_room, k, k_t, v_t, q, dout, dk, dv]| {
            let [dk, dv] = [dk, dv].map(|buffer| &mut buffer[..keys.len() * dims.head_dim]);
            dk.fill(0.0);
            dv.fill(0.0);
            let mut near =
                gather_blocks(self.problem, (row, kv_head), &keys, [k, k_t, v_t], [&mut *dk, &mut *dv]);
            for head in self.query_heads(kv_head) {
                for queries in blocks(visible.queries_of(&keys), dims.num_queries, QUERY_BLOCK) {
                    let (problem, upstream) = (self.problem, self.upstream);
                    let of_queries =
                        QueryBlock::gather_both(problem, upstream, (row, head), queries, [q, dout]);
                    for (block, gradients) in &mut near {
                        let rooms = [&mut *p, ds, p_room, ds_room];
                        self.tile(row, head, (&of_queries, block), gradients, rooms, add_to_dq);
                    }
                }
            }
            // SAFETY: no other task has these keys of this row and KV head.
            unsafe { self.dk.head((row, kv_head), &keys) }.round_from(dk);
            // SAFETY: as above.
            unsafe { self.dv.head((row, kv_head), &keys) }.round_from(dv);
        });
    }

    /// What a block of queries of one head adds to the gradients `dk` and `dv` of a block of keys and, if asked for, the
    /// block of keys to `dq`.
    fn tile(
        &self,
        row: usize,
        head: usize,
        ((queries, terms), keys): (&(QueryBlock<'_, T>, QueryTerms<'_, T>), &KeyBlock<'_, T>),
        [dk, dv]: &mut [&mut [f32]; 2],
        [p, ds, p_room, ds_room]: [&mut [f32]; 4],
        add_to_dq: bool,
    ) {
        const { assert!(begin_at_multiples(T::TERMS) && T::BACKWARD_STRIP.is_multiple_of(T::TERMS)) }
        let Problem { kernel, scale, layout, .. } = *self.problem;
        let spans = spans(layout.visible(row), queries.queries.clone(), keys.keys.clone(), T::TERMS);
        for span in strips(spans, T::BACKWARD_STRIP) {
            self.recompute(row, head, &span, (queries, keys), [p, ds]);
            let (num_queries, num_keys) = (span.queries.len(), span.keys.len());
            let p_t = T::from_tile_transposed(p, num_queries, num_keys, p_room);
            let [q, dout] = terms.of(&span, queries);
            let (dk, dv) = (keys.rows_of(&span, dk), keys.rows_of(&span, dv));
            T::multiply(kernel, dv, Store::Add, 1.0, p_t, dout);
            let ds_t = if add_to_dq {
                let [ds, ds_t] = T::from_tile_both(ds, num_queries, num_keys, ds_room);
                // SAFETY: a query head has one KV head and is only touched by that head's task.
                unsafe { self.add_to_dq(row, head, &span, keys, ds) };
                ds_t
            } else {
                T::from_tile_transposed(ds, num_queries, num_keys, ds_room)
            };
            T::multiply(kernel, dk, Store::Add, scale, ds_t, q);
        }
    }

    /// `dq` of a block of queries.
    fn query_block(&self, row: usize, head: usize, queries: Range<usize>) {
        let Problem { dims, layout, .. } = self.problem;
        let visible = layout.visible(row);
        let lengths = dq_lengths::<T>(queries.len(), dims.head_dim);
        with_scratch(lengths, |[p, ds, room, k, k_t, v_t, q, dout]| {
            // SAFETY: no other task has this row, head and block of queries.
            unsafe { self.dq.head((row, head), &queries) }.fill(0.0);
            let of_queries =
                QueryBlock::gather(self.problem, self.upstream, (row, head), queries.clone(), [q, dout]);
            for keys in blocks(visible.hull(&queries), dims.num_keys, KEY_BLOCK) {
                let kv_head = layout.q_to_kv()[head];
                let block = KeyBlock::gather(self.problem, (row, kv_head), keys.clone(), [k, k_t, v_t]);
                for span in strips(spans(visible, queries.clone(), keys, T::TERMS), T::BACKWARD_STRIP) {
                    self.recompute(row, head, &span, (&of_queries, &block), [p, ds]);
                    let ds = T::from_tile(ds, span.queries.len(), span.keys.len(), room);
                    // SAFETY: as above.
                    unsafe { self.add_to_dq(row, head, &span, &block, ds) };
                }
            }
        });
    }

    /// The probabilities of a rectangle in `p` and the gradients of its scores in `ds`, `[queries, keys]` both
    /// with rows [`ROW_STRIDE`] apart.
    fn recompute(
        &self,
        row: usize,
        head: usize,
        span: &Span,
        (queries, keys): (&QueryBlock<'_, T>, &KeyBlock<'_, T>),
        [p, ds]: [&mut [f32]; 2],
    ) {
        let Problem { kernel, dims, scale, layout, .. } = *self.problem;
        let Upstream { lse, delta, .. } = self.upstream;
        let (num_queries, num_keys) = (span.queries.len(), span.keys.len());
        let [q, dout] = queries.of(span);
        let [k_t, v_t] = keys.transposed_of(span);
        let [scores, gradients] =
            [&mut *p, &mut *ds].map(|tile| MatMut::new(tile, num_queries, num_keys, ROW_STRIDE));
        T::multiply(kernel, scores, Store::Overwrite, scale, q, k_t);
        T::multiply(kernel, gradients, Store::Overwrite, 1.0, dout, v_t);
        let first = (row * dims.num_heads + head) * dims.num_queries + span.queries.start;
        let terms = RowTerms { lse: &lse[first..][..num_queries], delta: &delta[first..][..num_queries] };
        softmax_backward(span, layout.visible(row), &terms, p, ds);
    }

    /// Adds `scale ds k` of a rectangle.
    ///
    /// # Safety
    /// No other thread may touch these queries of this row and head of `dq` meanwhile.
    unsafe fn add_to_dq(
        &self,
        row: usize,
        head: usize,
        span: &Span,
        block: &KeyBlock<'_, T>,
        ds: Mat<'_, T::Tile>,
    ) {
        // SAFETY: as the caller promises.
        let dq = unsafe { self.dq.head((row, head), &span.queries) };
        let &Problem { kernel, scale, .. } = self.problem;
        T::multiply(kernel, dq, Store::Add, scale, ds, block.terms_of(span));
    }

    fn query_heads(&self, kv_head: usize) -> impl Iterator<Item = usize> {
        let q_to_kv = self.problem.layout.q_to_kv().iter().enumerate();
        q_to_kv.filter(move |(_, used)| **used == kv_head).map(|(head, _)| head)
    }
}

#[cfg(test)]
mod tests {
    use super::one_task_per_kv_head;

    #[test]
    fn kv_heads_are_divided_when_they_leave_too_many_threads_idle() {
        for (num_tasks, num_threads) in [(8, 1), (1, 1), (8, 2), (3, 2), (8, 8), (23, 8)] {
            assert!(one_task_per_kv_head(num_tasks, num_threads), "{num_tasks} on {num_threads}");
        }
        for (num_tasks, num_threads) in [(1, 2), (3, 5), (8, 6), (9, 8)] {
            assert!(!one_task_per_kv_head(num_tasks, num_threads), "{num_tasks} on {num_threads}");
        }
    }
}
