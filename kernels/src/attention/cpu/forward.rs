//! Forward: one task per (sequence, query head, some blocks of queries), each with an online softmax.

use super::{
    Precision, Problem,
    precision::{Form, terms},
    scratch::ForwardScratch,
    softmax::{Running, cap_scores, online_softmax},
    tiles::{KEY_BLOCK, QUERY_BLOCK, cached_tokens, rectangles, strips},
};
use crate::attention::blocks::{blocks, within};
use crate::attention::dims::Dims;
use crate::matrix::{HeadAt, HeadsMut, MatMut, Store};
use rayon::prelude::*;
use std::ops::Range;

/// Tasks differ in their number of keys. With so many tasks, the last one is short compared with a thread's
/// total work.
const TASKS_PER_THREAD: usize = 8;

/// Writes `o [b, sq, hq, d]` and `lse [b, hq, sq]`.
pub(in crate::attention) fn forward<T: Precision>(
    problem: &Problem<'_, T>,
    o: &mut [T::Element],
    lse: &mut [f32],
) {
    let dims = &problem.dims;
    let o = HeadsMut::new(o, dims.num_queries, dims.num_heads, dims.head_dim);
    let queries_per_task = queries_per_task(dims, rayon::current_num_threads());
    let mut tasks = Vec::new();
    for (index, lse) in lse.chunks_mut(dims.num_queries.max(1)).enumerate() {
        let at = HeadAt::new(index, dims.num_heads);
        for (task, lse) in lse.chunks_mut(queries_per_task).enumerate() {
            let start = task * queries_per_task;
            tasks.push(Task { at, queries: start..start + lse.len(), lse });
        }
    }
    tasks.into_par_iter().for_each(|task| task.run(problem, &o));
}

/// As many queries as can share one copy of keys and values, unless that leaves too few tasks for an even
/// load.
///
/// The tiles are the same as with one block per task, so the results have the same bits.
fn queries_per_task(dims: &Dims, num_threads: usize) -> usize {
    let num_blocks = dims.batch * dims.num_heads * dims.num_queries.div_ceil(QUERY_BLOCK);
    let most_blocks = (num_blocks / (TASKS_PER_THREAD * num_threads)).max(1);
    cached_tokens(QUERY_BLOCK, dims.head_dim).min(most_blocks * QUERY_BLOCK)
}

/// Some queries of one query head.
struct Task<'a> {
    at: HeadAt,
    queries: Range<usize>,
    lse: &'a mut [f32],
}

impl Task<'_> {
    fn run<T: Precision>(self, problem: &Problem<'_, T>, o: &HeadsMut<'_, T::Element>) {
        let Problem { dims, .. } = problem;
        ForwardScratch::for_queries::<T>(dims.num_queries, dims.head_dim).with(|scratch| {
            let running = self.accumulate(problem, scratch);
            // SAFETY: no other task has these queries of this sequence and head.
            let o = unsafe { o.head(self.at, &self.queries) };
            running.finish(o, self.lse);
        });
    }

    /// The softmax over all keys.
    fn accumulate<'s, T: Precision>(
        &self,
        problem: &Problem<'_, T>,
        scratch: ForwardScratch<&'s mut [f32]>,
    ) -> Running<'s> {
        let Problem { kernel, dims, scale, layout, .. } = *problem;
        let ForwardScratch { scores, p, q, k_t, v, output, max, sums } = scratch;
        let visible = layout.visible(self.at.sequence);
        let kv_head = HeadAt { head: layout.q_to_kv()[self.at.head], ..self.at };
        let mut running = Running::new(&self.queries, dims.head_dim, max, sums, output);
        let q = T::gather(problem.q.head(self.at, &self.queries), Form::Rows, q);
        for keys in blocks(visible.hull(&self.queries), dims.num_keys, KEY_BLOCK) {
            let k_t = T::gather(problem.k.head(kv_head, &keys), Form::Transposed, k_t);
            let v = T::gather(problem.v.head(kv_head, &keys), Form::TokenTerms, v);
            let tiles = blocks(self.queries.clone(), dims.num_queries, QUERY_BLOCK);
            for rectangle in tiles
                .flat_map(|queries| strips(rectangles(visible, queries, keys.clone(), T::TERMS), T::STRIP))
            {
                let in_queries = within(&rectangle.queries, &self.queries);
                let in_keys = within(&rectangle.keys, &keys);
                let k_t = k_t.columns(in_keys.clone());
                let s = rectangle.scores_mut(scores);
                T::multiply(kernel, s, Store::Overwrite, scale, q.rows(in_queries.clone()), k_t);
                if let Some(cap) = layout.logits().softcap {
                    cap_scores(&rectangle, cap, scores);
                }
                online_softmax(&rectangle, visible, scores, &mut running);
                let p = T::from_tile(rectangle.scores(scores), p);
                let output = &mut running.output[in_queries.start * dims.head_dim..];
                let output = MatMut::new(output, in_queries.len(), dims.head_dim, dims.head_dim);
                T::multiply(kernel, output, Store::Add, 1.0, p, v.rows(terms::<T>(in_keys)));
            }
        }
        running
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_as_long_as_an_even_load_allows() {
        let dims = |num_heads, num_queries, head_dim| Dims {
            batch: 1,
            num_queries,
            num_keys: num_queries,
            num_heads,
            num_kv_heads: num_heads,
            head_dim,
        };
        let cached = cached_tokens(QUERY_BLOCK, 32);
        assert!(cached >= 4 * QUERY_BLOCK && cached.is_multiple_of(QUERY_BLOCK), "{cached}");
        assert_eq!(queries_per_task(&dims(8, 1 << 20, 32), 2), cached);
        assert_eq!(queries_per_task(&dims(1, 16 * QUERY_BLOCK, 32), 1), 2 * QUERY_BLOCK);
        assert_eq!(queries_per_task(&dims(1, 16 * QUERY_BLOCK, 32), 16), QUERY_BLOCK);
        assert_eq!(
            queries_per_task(&dims(64, 1 << 20, 1024), 1),
            QUERY_BLOCK,
            "one tile exceeds the cache budget"
        );
        assert_eq!(queries_per_task(&dims(1, 0, 32), 1), QUERY_BLOCK);
    }
}
