//! Backward: recomputes the probabilities from the log-denominators, rectangle by rectangle.
//!
//! `p = exp(scale q k^T - lse)`, `ds = p * (dout v^T - delta)`, then `dv += p^T dout`, `dk += scale ds^T q` and
//! `dq += scale ds k`.

use super::{
    Precision, Problem, Upstream,
    gathered::{KeyBlock, QueryBlock, QueryTerms, SummedKeys},
    precision::terms,
    scratch::BackwardScratch,
    softmax::{RowTerms, cap_scores, softmax_backward},
    tiles::{KEY_BLOCK, QUERY_BLOCK, begin_at_multiples, cached_tokens, rectangles, strips},
};
use crate::attention::VisibleRanges;
use crate::attention::blocks::{Rectangle, blocks, within};
use crate::cast::Float;
use crate::matrix::{HeadAt, HeadsMut, Mat, MatMut, Store};
use rayon::prelude::*;
use std::ops::Range;

/// The outputs of the backward pass.
pub(in crate::attention) struct Gradients<'a, E> {
    /// `[b, sq, hq, d]`. In f32, because every block of keys adds to it.
    pub(in crate::attention) dq: &'a mut [f32],
    /// `[b, skv, hkv, d]`
    pub(in crate::attention) dk: &'a mut [E],
    /// `[b, skv, hkv, d]`
    pub(in crate::attention) dv: &'a mut [E],
}

/// Writes the gradients, with the same bits for both ways of dividing the work.
///
/// One task per (sequence, KV head) needs five matmuls per rectangle. If these are too few tasks for the
/// threads, one task per (sequence, KV head, block of keys) computes `dk` and `dv`, and then one per
/// (sequence, query head, block of queries) computes `dq`. That takes seven matmuls, since scores and their
/// gradients are computed twice, but gives as many tasks as blocks. Both ways sum the same rectangles in the
/// same order.
pub(in crate::attention) fn backward<T: Precision>(
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
            pass.kv_head(HeadAt::new(index, dims.num_kv_heads));
        });
    } else {
        pass.in_two_sweeps();
    }
}

fn clear<E: Float>(gradient: &mut [E]) {
    gradient.fill(E::zero());
}

/// Returns whether the threads that whole KV heads keep busy are a larger share than five of seven matmuls.
fn one_task_per_kv_head(num_tasks: usize, num_threads: usize) -> bool {
    7 * num_tasks >= 5 * num_threads * num_tasks.div_ceil(num_threads)
}

struct Pass<'a, T: Precision> {
    problem: &'a Problem<'a, T>,
    upstream: &'a Upstream<'a, T>,
    dq: HeadsMut<'a>,
    dk: HeadsMut<'a, T::Element>,
    dv: HeadsMut<'a, T::Element>,
}

impl<T: Precision> Pass<'_, T> {
    /// All gradients of one KV head and the query heads that use it.
    fn kv_head(&self, kv_head: HeadAt) {
        let dims = &self.problem.dims;
        for at in self.query_heads(kv_head) {
            // SAFETY: each query head has one KV head, so only that head's task accesses it.
            unsafe { self.dq.head(at, &(0..dims.num_queries)) }.fill(0.0);
        }
        for keys in blocks(0..dims.num_keys, dims.num_keys, cached_tokens(KEY_BLOCK, dims.head_dim)) {
            self.keys(kv_head, keys, true);
        }
    }

    fn in_two_sweeps(&self) {
        let dims = &self.problem.dims;
        let key_blocks = dims.num_keys.div_ceil(KEY_BLOCK);
        (0..dims.batch * dims.num_kv_heads * key_blocks).into_par_iter().for_each(|index| {
            let start = index % key_blocks * KEY_BLOCK;
            let keys = start..dims.num_keys.min(start + KEY_BLOCK);
            self.keys(HeadAt::new(index / key_blocks, dims.num_kv_heads), keys, false);
        });
        let query_blocks = dims.num_queries.div_ceil(QUERY_BLOCK);
        (0..dims.batch * dims.num_heads * query_blocks).into_par_iter().for_each(|index| {
            let start = index % query_blocks * QUERY_BLOCK;
            let queries = start..dims.num_queries.min(start + QUERY_BLOCK);
            self.query_block(HeadAt::new(index / query_blocks, dims.num_heads), queries);
        });
    }

    /// `dk` and `dv` of some blocks of keys of a KV head, and with `add_to_dq` their contribution to `dq`. Queries are
    /// copied once for all of these blocks; the rectangles are those of single blocks.
    fn keys(&self, kv_head: HeadAt, keys: Range<usize>, add_to_dq: bool) {
        let Self { problem, upstream, .. } = self;
        let Problem { dims, layout, .. } = problem;
        let visible = layout.visible(kv_head.sequence);
        BackwardScratch::for_keys::<T>(keys.len(), dims.head_dim).with(|mut scratch| {
            let mut cached: Vec<_> = blocks(keys.clone(), keys.end, KEY_BLOCK)
                .map(|keys| SummedKeys::gather(problem, kv_head, keys, &mut scratch))
                .collect();
            let BackwardScratch { p, ds, p_t, ds_t, ds_rows, q, dout, q_terms, dout_terms, .. } = scratch;
            let mut task = Task { pass: self, visible, p, ds, p_t, ds_t, ds_rows };
            for at in self.query_heads(kv_head) {
                for queries in blocks(visible.queries_of(&keys), dims.num_queries, QUERY_BLOCK) {
                    let queries = QueryBlock::gather(problem, upstream, at, queries, q, dout);
                    let terms = queries.gather_terms(problem, upstream, q_terms, dout_terms);
                    for keys in &mut cached {
                        task.add_tile(&queries, &terms, keys, add_to_dq);
                    }
                }
            }
            for SummedKeys { block, dk, dv } in cached {
                // SAFETY: no other task has these keys of this sequence and KV head.
                unsafe { self.dk.head(kv_head, &block.range) }.round_from(dk);
                // SAFETY: as above.
                unsafe { self.dv.head(kv_head, &block.range) }.round_from(dv);
            }
        });
    }

    /// `dq` of a block of queries.
    fn query_block(&self, at: HeadAt, queries: Range<usize>) {
        let Self { problem, upstream, .. } = self;
        let Problem { dims, layout, .. } = problem;
        let visible = layout.visible(at.sequence);
        let kv_head = HeadAt { head: layout.q_to_kv()[at.head], ..at };
        BackwardScratch::for_queries::<T>(queries.len(), dims.head_dim).with(|scratch| {
            let BackwardScratch { p, ds, p_t, ds_t, ds_rows, k, k_t, v_t, q, dout, .. } = scratch;
            // SAFETY: no other task has this sequence, head and block of queries.
            unsafe { self.dq.head(at, &queries) }.fill(0.0);
            let queries = QueryBlock::gather(problem, upstream, at, queries, q, dout);
            let mut task = Task { pass: self, visible, p, ds, p_t, ds_t, ds_rows };
            for keys in blocks(visible.hull(&queries.range), dims.num_keys, KEY_BLOCK) {
                let keys = KeyBlock::gather(problem, kv_head, keys, k, k_t, v_t);
                for rectangle in task.strips(&queries, &keys) {
                    task.recompute(&rectangle, &queries, &keys);
                    let ds = T::from_tile(rectangle.scores(task.ds), task.ds_rows);
                    // SAFETY: as above.
                    unsafe { self.add_to_dq(&rectangle, at, &keys, ds) };
                }
            }
        });
    }

    /// Adds `scale ds k` of a rectangle.
    ///
    /// # Safety
    /// No other thread may access these queries of this sequence and head of `dq` meanwhile.
    unsafe fn add_to_dq(
        &self,
        rectangle: &Rectangle,
        at: HeadAt,
        block: &KeyBlock<'_, T>,
        ds: Mat<'_, T::Operand>,
    ) {
        // SAFETY: by this function's contract.
        let dq = unsafe { self.dq.head(at, &rectangle.queries) };
        let &Problem { kernel, scale, .. } = self.problem;
        let k = block.k.rows(terms::<T>(within(&rectangle.keys, &block.range)));
        T::multiply(kernel, dq, Store::Add, scale, ds, k);
    }

    /// The query heads that use a KV head.
    fn query_heads(&self, kv_head: HeadAt) -> impl Iterator<Item = HeadAt> {
        let q_to_kv = self.problem.layout.q_to_kv().iter().enumerate();
        q_to_kv
            .filter(move |(_, used)| **used == kv_head.head)
            .map(move |(head, _)| HeadAt { head, ..kv_head })
    }
}

/// A task of a pass, with scratch for the strip that it computes.
struct Task<'a, T: Precision> {
    pass: &'a Pass<'a, T>,
    /// Of the task's sequence.
    visible: &'a VisibleRanges,
    p: &'a mut [f32],
    ds: &'a mut [f32],
    p_t: &'a mut [f32],
    ds_t: &'a mut [f32],
    ds_rows: &'a mut [f32],
}

impl<'a, T: Precision> Task<'a, T> {
    /// The visible pairs of two blocks as strips of rectangles.
    fn strips(
        &self,
        queries: &QueryBlock<'_, T>,
        keys: &KeyBlock<'_, T>,
    ) -> impl Iterator<Item = Rectangle> + use<'a, T> {
        const { assert!(begin_at_multiples(T::TERMS) && T::BACKWARD_STRIP.is_multiple_of(T::TERMS)) }
        let rectangles = rectangles(self.visible, queries.range.clone(), keys.range.clone(), T::TERMS);
        strips(rectangles, T::BACKWARD_STRIP)
    }

    /// Adds the contribution of a block of queries of one head to the `dk` and `dv` of a block of keys, and
    /// with `add_to_dq` that of the keys to `dq`.
    fn add_tile(
        &mut self,
        queries: &QueryBlock<'_, T>,
        of_queries: &QueryTerms<'_, T>,
        keys: &mut SummedKeys<'_, T>,
        add_to_dq: bool,
    ) {
        let SummedKeys { block, dk, dv } = keys;
        let Problem { kernel, dims, scale, .. } = *self.pass.problem;
        for rectangle in self.strips(queries, block) {
            self.recompute(&rectangle, queries, block);
            let in_queries = terms::<T>(within(&rectangle.queries, &queries.range));
            let first = within(&rectangle.keys, &block.range).start * dims.head_dim;
            let rows = |sums| MatMut::new(sums, rectangle.keys.len(), dims.head_dim, dims.head_dim);
            let p_t = T::from_tile_transposed(rectangle.scores(self.p), self.p_t);
            let dout = of_queries.dout.rows(in_queries.clone());
            T::multiply(kernel, rows(&mut dv[first..]), Store::Add, 1.0, p_t, dout);
            let ds = rectangle.scores(self.ds);
            let ds_t = T::from_tile_transposed(ds, self.ds_t);
            if add_to_dq {
                // With one term per element, a copy serves both matmuls.
                let ds = if T::TERMS == 1 { ds_t.t() } else { T::from_tile(ds, self.ds_rows) };
                // SAFETY: each query head has one KV head, so only that head's task accesses it.
                unsafe { self.pass.add_to_dq(&rectangle, queries.at, block, ds) };
            }
            let q = of_queries.q.rows(in_queries);
            T::multiply(kernel, rows(&mut dk[first..]), Store::Add, scale, ds_t, q);
        }
    }

    /// Computes the probabilities `p` of a rectangle and the gradients `ds` of its scores.
    fn recompute(&mut self, rectangle: &Rectangle, queries: &QueryBlock<'_, T>, keys: &KeyBlock<'_, T>) {
        let Problem { kernel, dims, scale, layout, .. } = *self.pass.problem;
        let Upstream { lse, delta, .. } = self.pass.upstream;
        let in_queries = within(&rectangle.queries, &queries.range);
        let in_keys = within(&rectangle.keys, &keys.range);
        let (q, k_t) = (queries.q.rows(in_queries.clone()), keys.k_t.columns(in_keys.clone()));
        let (dout, v_t) = (queries.dout.rows(in_queries), keys.v_t.columns(in_keys));
        T::multiply(kernel, rectangle.scores_mut(self.p), Store::Overwrite, scale, q, k_t);
        T::multiply(kernel, rectangle.scores_mut(self.ds), Store::Overwrite, 1.0, dout, v_t);
        let softcap = layout.logits().softcap;
        if let Some(cap) = softcap {
            cap_scores(rectangle, cap, self.p);
        }
        let HeadAt { sequence, head } = queries.at;
        let first = (sequence * dims.num_heads + head) * dims.num_queries + rectangle.queries.start;
        let rows = first..first + rectangle.queries.len();
        let terms = RowTerms { lse: &lse[rows.clone()], delta: &delta[rows], softcap };
        softmax_backward(rectangle, self.visible, &terms, self.p, self.ds);
    }
}

#[cfg(test)]
mod tests {
    use super::one_task_per_kv_head;

    #[test]
    fn kv_heads_are_divided_if_too_many_threads_would_be_idle() {
        for (num_tasks, num_threads) in [(8, 1), (1, 1), (8, 2), (3, 2), (8, 8), (23, 8)] {
            assert!(one_task_per_kv_head(num_tasks, num_threads), "{num_tasks} on {num_threads}");
        }
        for (num_tasks, num_threads) in [(1, 2), (3, 5), (8, 6), (9, 8)] {
            assert!(!one_task_per_kv_head(num_tasks, num_threads), "{num_tasks} on {num_threads}");
        }
    }
}
