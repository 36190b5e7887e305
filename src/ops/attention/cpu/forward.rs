//! Forward: one task per (batch row, query head, block of queries), each with a running softmax.

use super::{
    Operand, Problem,
    matrix::{HeadsMut, MatMut, Store},
    scratch::{query_block_lengths, with_scratch},
    softmax::{ROW_STRIDE, Running, online_softmax},
    tiles::{KEY_BLOCK, QUERY_BLOCK, spans, strips, within},
};
use crate::ops::attention::blocks::blocks;
use rayon::prelude::*;
use std::ops::Range;

/// Writes `o [b, sq, hq, d]` and `lse [b, hq, sq]`.
pub(in crate::ops::attention) fn forward<T: Operand>(
    problem: &Problem<'_, T>,
    o: &mut [f32],
    lse: &mut [f32],
) {
    let dims = &problem.dims;
    let o = HeadsMut::new(o, dims.num_queries, dims.num_heads, dims.head_dim);
    let mut tasks: Vec<(Task, &mut [f32])> = Vec::new();
    for (index, lse) in lse.chunks_mut(dims.num_queries.max(1)).enumerate() {
        for (block, lse) in lse.chunks_mut(QUERY_BLOCK).enumerate() {
            let start = block * QUERY_BLOCK;
            let (row, head) = (index / dims.num_heads, index % dims.num_heads);
            tasks.push((Task { row, head, queries: start..start + lse.len() }, lse));
        }
    }
    tasks.into_par_iter().for_each(|(task, lse)| task.run(problem, &o, lse));
}

struct Task {
    row: usize,
    head: usize,
    queries: Range<usize>,
}

impl Task {
    fn run<T: Operand>(&self, problem: &Problem<'_, T>, o: &HeadsMut<'_>, lse: &mut [f32]) {
        let head_dim = problem.dims.head_dim;
        let rows = self.queries.len();
        with_scratch(
            query_block_lengths::<T>(rows, head_dim),
            |[scores, room, q, k_t, v, output, max, sum]| {
                output.fill(0.0);
                max.fill(f32::NEG_INFINITY);
                sum.fill(0.0);
                let mut running = Running { max, sum, output, head_dim, first_query: self.queries.start };
                self.accumulate(problem, [scores, room], [q, k_t, v], &mut running);
                // SAFETY: no other task has this row, head and block of queries.
                let o = unsafe { o.head(self.row, self.head, &self.queries) };
                finish(&running, o, lse);
            },
        );
    }

    fn accumulate<T: Operand>(
        &self,
        problem: &Problem<'_, T>,
        [scores, room]: [&mut [f32]; 2],
        [q, k_t, v]: [&mut [f32]; 3],
        running: &mut Running<'_>,
    ) {
        let Problem { kernel, dims, scale, geometry, .. } = *problem;
        let visible = geometry.visible(self.row);
        let kv_head = geometry.q_to_kv()[self.head];
        let q = problem.q.gather(self.row, self.head, &self.queries, T::in_memory(q));
        for keys in blocks(visible.hull(&self.queries), dims.num_keys, KEY_BLOCK) {
            let k_t = T::gather_transposed(&problem.k, self.row, kv_head, &keys, k_t);
            let v = problem.v.gather(self.row, kv_head, &keys, T::in_memory(v));
            for span in strips(spans(visible, self.queries.clone(), keys.clone()), T::STRIP) {
                let (num_queries, num_keys) = (span.queries.len(), span.keys.len());
                let (in_queries, in_keys) = (within(&span.queries, &self.queries), within(&span.keys, &keys));
                let s = MatMut::new(scores, num_queries, num_keys, ROW_STRIDE);
                let k_t = k_t.columns(in_keys.clone());
                T::multiply(kernel, s, Store::Overwrite, scale, q.rows(in_queries.clone()), k_t);
                online_softmax(&span, visible, scores, running);
                let p = T::from_tile(scores, num_queries, num_keys, room);
                let output = &mut running.output[in_queries.start * dims.head_dim..];
                let output = MatMut::new(output, num_queries, dims.head_dim, dims.head_dim);
                T::multiply(kernel, output, Store::Add, 1.0, p, v.rows(in_keys));
            }
        }
    }
}

/// Divides by the softmax's denominator; a query that saw nothing gets 0 and -inf.
fn finish(running: &Running<'_>, mut o: MatMut<'_>, lse: &mut [f32]) {
    let rows = running.output.chunks(running.head_dim);
    let states = running.max.iter().zip(running.sum.iter());
    for (index, ((lse, output), (&max, &sum))) in lse.iter_mut().zip(rows).zip(states).enumerate() {
        let inverse = if max == f32::NEG_INFINITY { 0.0 } else { 1.0 / sum };
        *lse = max + sum.ln();
        for (o, output) in o.row(index).iter_mut().zip(output) {
            *o = output * inverse;
        }
    }
}
