//! Backward: recomputes the probabilities from the log-denominators, rectangle by rectangle.
//!
//! `p = exp(scale q k^T - lse)`, `ds = p * (dout v^T - delta)`, then `dv += p^T dout`, `dk += scale ds^T q` and
//! `dq += scale ds k`.

use super::{
    Precision, Problem, Upstream,
    gathered::{KeyBlock, QueryBlock, QueryTerms, gather_blocks},
    precision::from_tile_both,
    scratch::{dq_lengths, keys_lengths, with_scratch},
    softmax::{ROW_STRIDE, RowTerms, cap_scores, softmax_backward},
    tiles::{KEY_BLOCK, QUERY_BLOCK, Rectangle, begin_at_multiples, cached_tokens, rectangles, strips},
};
use crate::attention::blocks::blocks;
use crate::cast::Float;
use crate::matrix::{HeadsMut, Mat, MatMut, Store};
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
            pass.kv_head(index / dims.num_kv_heads, index % dims.num_kv_heads);
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
    fn kv_head(&self, sequence: usize, kv_head: usize) {
        let dims = &self.problem.dims;
        for head in self.query_heads(kv_head) {
            // SAFETY: each query head has one KV head, so only that head's task accesses it.
            unsafe { self.dq.head((sequence, head), &(0..dims.num_queries)) }.fill(0.0);
        }
        for keys in blocks(0..dims.num_keys, dims.num_keys, cached_tokens(KEY_BLOCK, dims.head_dim)) {
            self.keys(sequence, kv_head, keys, true);
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

    /// `dk` and `dv` of some blocks of keys, and with `add_to_dq` their contribution to `dq`. Queries are
    /// copied once for all of these blocks; the rectangles are those of single blocks.
    fn keys(&self, sequence: usize, kv_head: usize, keys: Range<usize>, add_to_dq: bool) {
        let Problem { dims, layout, .. } = *self.problem;
        let visible = layout.visible(sequence);
        let lengths = keys_lengths::<T>(keys.len(), dims.head_dim);
        with_scratch(lengths, |[p, ds, p_converted, ds_converted, k, k_t, v_t, q, dout, dk, dv]| {
            let [dk, dv] = [dk, dv].map(|buffer| &mut buffer[..keys.len() * dims.head_dim]);
            dk.fill(0.0);
            dv.fill(0.0);
            let mut cached =
                gather_blocks(self.problem, (sequence, kv_head), &keys, [k, k_t, v_t], [&mut *dk, &mut *dv]);
            for head in self.query_heads(kv_head) {
                for queries in blocks(visible.queries_of(&keys), dims.num_queries, QUERY_BLOCK) {
                    let (problem, upstream) = (self.problem, self.upstream);
                    let of_queries =
                        QueryBlock::gather_both(problem, upstream, (sequence, head), queries, [q, dout]);
                    for (block, gradients) in &mut cached {
                        let buffers = [&mut *p, ds, p_converted, ds_converted];
                        self.tile(sequence, head, (&of_queries, block), gradients, buffers, add_to_dq);
                    }
                }
            }
            // SAFETY: no other task has these keys of this sequence and KV head.
            unsafe { self.dk.head((sequence, kv_head), &keys) }.round_from(dk);
            // SAFETY: as above.
            unsafe { self.dv.head((sequence, kv_head), &keys) }.round_from(dv);
        });
    }

    /// Adds the contribution of a block of queries of one head to the `dk` and `dv` of a block of keys, and
    /// with `add_to_dq` that of the keys to `dq`.
    fn tile(
        &self,
        sequence: usize,
        head: usize,
        ((queries, terms), keys): (&(QueryBlock<'_, T>, QueryTerms<'_, T>), &KeyBlock<'_, T>),
        [dk, dv]: &mut [&mut [f32]; 2],
        [p, ds, p_converted, ds_converted]: [&mut [f32]; 4],
        add_to_dq: bool,
    ) {
        const { assert!(begin_at_multiples(T::TERMS) && T::BACKWARD_STRIP.is_multiple_of(T::TERMS)) }
        let Problem { kernel, scale, layout, .. } = *self.problem;
        let rectangles =
            rectangles(layout.visible(sequence), queries.queries.clone(), keys.keys.clone(), T::TERMS);
        for rectangle in strips(rectangles, T::BACKWARD_STRIP) {
            self.recompute(sequence, head, &rectangle, (queries, keys), [p, ds]);
            let (num_queries, num_keys) = (rectangle.queries.len(), rectangle.keys.len());
            let p_t = T::from_tile_transposed(p, num_queries, num_keys, p_converted);
            let [q, dout] = terms.of(&rectangle, queries);
            let (dk, dv) = (keys.rows_of(&rectangle, dk), keys.rows_of(&rectangle, dv));
            T::multiply(kernel, dv, Store::Add, 1.0, p_t, dout);
            let ds_t = if add_to_dq {
                let [ds, ds_t] = from_tile_both::<T>(ds, num_queries, num_keys, ds_converted);
                // SAFETY: each query head has one KV head, so only that head's task accesses it.
                unsafe { self.add_to_dq(sequence, head, &rectangle, keys, ds) };
                ds_t
            } else {
                T::from_tile_transposed(ds, num_queries, num_keys, ds_converted)
            };
            T::multiply(kernel, dk, Store::Add, scale, ds_t, q);
        }
    }

    /// `dq` of a block of queries.
    fn query_block(&self, sequence: usize, head: usize, queries: Range<usize>) {
        let Problem { dims, layout, .. } = self.problem;
        let visible = layout.visible(sequence);
        let lengths = dq_lengths::<T>(queries.len(), dims.head_dim);
        with_scratch(lengths, |[p, ds, buffer, k, k_t, v_t, q, dout]| {
            // SAFETY: no other task has this sequence, head and block of queries.
            unsafe { self.dq.head((sequence, head), &queries) }.fill(0.0);
            let of_queries =
                QueryBlock::gather(self.problem, self.upstream, (sequence, head), queries.clone(), [q, dout]);
            for keys in blocks(visible.hull(&queries), dims.num_keys, KEY_BLOCK) {
                let kv_head = layout.q_to_kv()[head];
                let block = KeyBlock::gather(self.problem, (sequence, kv_head), keys.clone(), [k, k_t, v_t]);
                for rectangle in
                    strips(rectangles(visible, queries.clone(), keys, T::TERMS), T::BACKWARD_STRIP)
                {
                    self.recompute(sequence, head, &rectangle, (&of_queries, &block), [p, ds]);
                    let ds = T::from_tile(ds, rectangle.queries.len(), rectangle.keys.len(), buffer);
                    // SAFETY: as above.
                    unsafe { self.add_to_dq(sequence, head, &rectangle, &block, ds) };
                }
            }
        });
    }

    /// Computes the probabilities `p` of a rectangle and the gradients `ds` of its scores, both `[queries,
    /// keys]` with rows [`ROW_STRIDE`] apart.
    fn recompute(
        &self,
        sequence: usize,
        head: usize,
        rectangle: &Rectangle,
        (queries, keys): (&QueryBlock<'_, T>, &KeyBlock<'_, T>),
        [p, ds]: [&mut [f32]; 2],
    ) {
        let Problem { kernel, dims, scale, layout, .. } = *self.problem;
        let Upstream { lse, delta, .. } = self.upstream;
        let (num_queries, num_keys) = (rectangle.queries.len(), rectangle.keys.len());
        let [q, dout] = queries.of(rectangle);
        let [k_t, v_t] = keys.transposed_of(rectangle);
        let [scores, gradients] =
            [&mut *p, &mut *ds].map(|tile| MatMut::new(tile, num_queries, num_keys, ROW_STRIDE));
        T::multiply(kernel, scores, Store::Overwrite, scale, q, k_t);
        T::multiply(kernel, gradients, Store::Overwrite, 1.0, dout, v_t);
        let first = (sequence * dims.num_heads + head) * dims.num_queries + rectangle.queries.start;
        let softcap = layout.logits().softcap;
        if let Some(cap) = softcap {
            cap_scores(rectangle, cap, p);
        }
        let terms =
            RowTerms { lse: &lse[first..][..num_queries], delta: &delta[first..][..num_queries], softcap };
        softmax_backward(rectangle, layout.visible(sequence), &terms, p, ds);
    }

    /// Adds `scale ds k` of a rectangle.
    ///
    /// # Safety
    /// No other thread may access these queries of this sequence and head of `dq` meanwhile.
    unsafe fn add_to_dq(
        &self,
        sequence: usize,
        head: usize,
        rectangle: &Rectangle,
        block: &KeyBlock<'_, T>,
        ds: Mat<'_, T::Tile>,
    ) {
        // SAFETY: by this function's contract.
        let dq = unsafe { self.dq.head((sequence, head), &rectangle.queries) };
        let &Problem { kernel, scale, .. } = self.problem;
        T::multiply(kernel, dq, Store::Add, scale, ds, block.terms_of(rectangle));
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
    fn kv_heads_are_divided_if_too_many_threads_would_be_idle() {
        for (num_tasks, num_threads) in [(8, 1), (1, 1), (8, 2), (3, 2), (8, 8), (23, 8)] {
            assert!(one_task_per_kv_head(num_tasks, num_threads), "{num_tasks} on {num_threads}");
        }
        for (num_tasks, num_threads) in [(1, 2), (3, 5), (8, 6), (9, 8)] {
            assert!(!one_task_per_kv_head(num_tasks, num_threads), "{num_tasks} on {num_threads}");
        }
    }
}
