//! Forward: one task per (sequence, query head, some blocks of queries), each with an online softmax.

use super::{
    Precision, Problem,
    precision::{Form, terms},
    scratch::{queries_lengths, with_scratch},
    softmax::{ROW_STRIDE, Running, SUMS, cap_scores, online_softmax},
    tiles::{KEY_BLOCK, QUERY_BLOCK, cached_tokens, rectangles, strips, within},
};
use crate::attention::blocks::blocks;
use crate::attention::dims::Dims;
use crate::cast::Float;
use crate::matrix::{HeadsMut, MatMut, Store};
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
    let mut tasks: Vec<(Task, &mut [f32])> = Vec::new();
    for (index, lse) in lse.chunks_mut(dims.num_queries.max(1)).enumerate() {
        for (task, lse) in lse.chunks_mut(queries_per_task).enumerate() {
            let start = task * queries_per_task;
            let (sequence, head) = (index / dims.num_heads, index % dims.num_heads);
            tasks.push((Task { sequence, head, queries: start..start + lse.len() }, lse));
        }
    }
    tasks.into_par_iter().for_each(|(task, lse)| task.run(problem, &o, lse));
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

struct Task {
    sequence: usize,
    head: usize,
    queries: Range<usize>,
}

impl Task {
    fn run<T: Precision>(&self, problem: &Problem<'_, T>, o: &HeadsMut<'_, T::Element>, lse: &mut [f32]) {
        let head_dim = problem.dims.head_dim;
        let rows = self.queries.len();
        with_scratch(
            queries_lengths::<T>(problem.dims.num_queries, head_dim),
            |[scores, buffer, q, k_t, v, output, max, sums]| {
                let (output, max) = (&mut output[..rows * head_dim], &mut max[..rows]);
                let sums = &mut sums.as_chunks_mut().0[..rows];
                output.fill(0.0);
                max.fill(f32::NEG_INFINITY);
                sums.fill([0.0; SUMS]);
                let mut running = Running { max, sums, output, head_dim, first_query: self.queries.start };
                self.accumulate(problem, [scores, buffer], [q, k_t, v], &mut running);
                // SAFETY: no other task has these queries of this sequence and head.
                let o = unsafe { o.head((self.sequence, self.head), &self.queries) };
                finish(&mut running, o, lse);
            },
        );
    }

    fn accumulate<T: Precision>(
        &self,
        problem: &Problem<'_, T>,
        [scores, buffer]: [&mut [f32]; 2],
        [q, k_t, v]: [&mut [f32]; 3],
        running: &mut Running<'_>,
    ) {
        let Problem { kernel, dims, scale, layout, .. } = *problem;
        let visible = layout.visible(self.sequence);
        let kv_head = layout.q_to_kv()[self.head];
        let (of_q, of_kv) = ((self.sequence, self.head), (self.sequence, kv_head));
        let q = T::gather(&problem.q, of_q, &self.queries, Form::Rows, q);
        for keys in blocks(visible.hull(&self.queries), dims.num_keys, KEY_BLOCK) {
            let k_t = T::gather(&problem.k, of_kv, &keys, Form::Transposed, k_t);
            let v = T::gather(&problem.v, of_kv, &keys, Form::TokenTerms, v);
            let tiles = blocks(self.queries.clone(), dims.num_queries, QUERY_BLOCK);
            for rectangle in tiles
                .flat_map(|queries| strips(rectangles(visible, queries, keys.clone(), T::TERMS), T::STRIP))
            {
                let (num_queries, num_keys) = (rectangle.queries.len(), rectangle.keys.len());
                let (in_queries, in_keys) =
                    (within(&rectangle.queries, &self.queries), within(&rectangle.keys, &keys));
                let s = MatMut::new(scores, num_queries, num_keys, ROW_STRIDE);
                let k_t = k_t.columns(in_keys.clone());
                T::multiply(kernel, s, Store::Overwrite, scale, q.rows(in_queries.clone()), k_t);
                if let Some(cap) = layout.logits().softcap {
                    cap_scores(&rectangle, cap, scores);
                }
                online_softmax(&rectangle, visible, scores, running);
                let p = T::from_tile(scores, num_queries, num_keys, buffer);
                let output = &mut running.output[in_queries.start * dims.head_dim..];
                let output = MatMut::new(output, num_queries, dims.head_dim, dims.head_dim);
                T::multiply(kernel, output, Store::Add, 1.0, p, v.rows(terms::<T>(in_keys)));
            }
        }
    }
}

/// Divides by the softmax's denominator; a query without visible keys gets 0 and -inf.
fn finish<E: Float>(running: &mut Running<'_>, mut o: MatMut<'_, E>, lse: &mut [f32]) {
    let rows = running.output.chunks_mut(running.head_dim);
    let states = running.max.iter().zip(running.sums.iter());
    for ((lse, output), (&max, sums)) in lse.iter_mut().zip(rows).zip(states) {
        let sum: f32 = sums.iter().sum();
        let inverse = if max == f32::NEG_INFINITY { 0.0 } else { 1.0 / sum };
        *lse = max + sum.ln();
        output.iter_mut().for_each(|output| *output *= inverse);
    }
    o.round_from(running.output);
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
