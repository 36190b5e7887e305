//! The output of every chunk, once the states before them are known, and the gradient that it passes to the updates.

use super::super::segments::{CHUNK, Chunk, Segment};
use super::buffers::{HeadBuffers, KeyHead, ValueHead, by_chunk};
use super::scan::{exponentials, scale_rows_in_place};
use super::{Heads, HeadsMut, Problem, Sizes, Step, with_scratch};
use crate::cast::Float;
use crate::matrix::{HeadAt, Mat, MatMut, Store, multiply_f32};
use crate::simd::{self, simd_kernel};
use rayon::prelude::*;
use std::ops::Range;

/// The lengths of the buffers of a task: A, and the output.
pub(super) fn scratch_lengths(sizes: &Sizes) -> [usize; 2] {
    [CHUNK * CHUNK, CHUNK * sizes.value_dim]
}

/// Writes `O = exp(γ)∘(Q S) + A updates`, and adds the skip connection if there is one.
pub(super) fn forward<T: Float>(
    problem: &Problem<'_, T>,
    heads: &HeadBuffers<'_>,
    step: &Step<'_>,
    o: &HeadsMut<'_, T>,
) {
    let mut tasks = Vec::new();
    for value in &heads.values {
        let Some(segment) = step.segment(value.sequence) else { continue };
        tasks.extend(segment.chunks.iter().map(|chunk| (value, segment, chunk)));
    }
    tasks.into_par_iter().for_each(|(value, segment, chunk)| {
        with_scratch(scratch_lengths(&problem.sizes), |[a, output]| {
            let key = &heads.keys[value.key];
            let rows = segment.rows(chunk);
            attention(&key.qk[rows.start * CHUNK..], &value.decay[rows], a);
            chunk_output(&problem.sizes, key, value, segment, chunk, a, output);
            if let Some(skip) = problem.skip {
                let rows = segment.rows(chunk);
                add_skip(value, rows, skip[value.head], output, problem.sizes.value_dim);
            }
            let at = HeadAt { sequence: value.sequence, head: value.head };
            // SAFETY: no other task has these tokens of this sequence and value head.
            unsafe { o.head(at, &chunk.tokens) }.round_from(output);
        });
    });
}

/// Adds the values of some rows, times `skip`, to the output.
fn add_skip(value: &ValueHead<'_>, rows: Range<usize>, skip: f32, output: &mut [f32], value_dim: usize) {
    for block in &value.blocks {
        let width = block.columns.len();
        let values = block.errors[rows.start * width..rows.end * width].chunks_exact(width);
        for (values, output) in values.zip(output.chunks_exact_mut(value_dim)) {
            let output = output[block.columns.clone()].iter_mut();
            output.zip(values).for_each(|(output, value)| *output += skip * value);
        }
    }
}

fn chunk_output(
    sizes: &Sizes,
    key: &KeyHead<'_>,
    value: &ValueHead<'_>,
    segment: &Segment,
    chunk: &Chunk,
    a: &[f32],
    output: &mut [f32],
) {
    let (rows, len, key_dim) = (segment.rows(chunk), chunk.tokens.len(), sizes.key_dim);
    let a = Mat::new(a, len, len, CHUNK);
    let [q, ..] = key.rows_of_state();
    let q = Mat::new(&q[rows.start * key_dim..], len, key_dim, key_dim);
    for block in &value.blocks {
        let width = block.columns.len();
        let updates = Mat::new(&block.updates[rows.start * width..], len, width, width);
        let output = MatMut::new(&mut output[block.columns.start..], len, width, sizes.value_dim);
        let (lhs, rhs) = match block.slot(block.states, chunk.state) {
            None => (a, updates),
            Some(state) => (q, Mat::new(state, key_dim, width, width)),
        };
        multiply_f32(output, Store::Overwrite, 1.0, lhs, rhs);
    }
    if chunk.state.is_none() {
        return;
    }
    let (mut decays, mut to_end) = ([0.0; CHUNK], [0.0; CHUNK]);
    exponentials(&value.decay[rows.clone()], &mut decays, &mut to_end);
    scale_rows_in_place(output, &decays[..len], sizes.value_dim);
    for block in &value.blocks {
        let width = block.columns.len();
        let updates = Mat::new(&block.updates[rows.start * width..], len, width, width);
        let output = MatMut::new(&mut output[block.columns.start..], len, width, sizes.value_dim);
        multiply_f32(output, Store::Add, 1.0, a, updates);
    }
}

/// Reads the output's gradient, and writes `Aᵀ dO`, its share of the gradients of the updates.
pub(super) fn backward<T: Float>(
    problem: &Problem<'_, T>,
    heads: &mut HeadBuffers<'_>,
    step: &Step<'_>,
    dout: &Heads<'_, T>,
) {
    let dim = problem.sizes.value_dim;
    let HeadBuffers { keys, values } = heads;
    let mut tasks = Vec::new();
    for value in values {
        let Some(segment) = step.segment(value.sequence) else { continue };
        let at = HeadAt { sequence: value.sequence, head: value.head };
        let mut rows_of_blocks: Vec<_> = value
            .blocks
            .iter_mut()
            .map(|block| by_chunk([(&mut *block.gradients, block.columns.len())], segment))
            .collect();
        let (decay, key) = (&*value.decay, &keys[value.key]);
        for (chunk, [dout]) in segment.chunks.iter().zip(by_chunk([(&mut *value.dout, dim)], segment)) {
            let gradients: Vec<_> = rows_of_blocks.iter_mut().flat_map(Iterator::next).collect();
            tasks.push((at, (key, decay), (segment, chunk), dout, gradients));
        }
    }
    tasks.into_par_iter().for_each(|(at, (key, decay), (segment, chunk), rows, gradients)| {
        with_scratch([CHUNK * CHUNK], |[a]| {
            let len = chunk.tokens.len();
            let dout = dout.gather_f32(at, &chunk.tokens, rows);
            let (rows, mut column) = (segment.rows(chunk), 0);
            attention(&key.qk[rows.start * CHUNK..], &decay[rows], a);
            for [gradients] in gradients {
                let width = gradients.len() / len;
                let dout = dout.columns(column..column + width);
                let gradients = MatMut::new(gradients, len, width, width);
                multiply_f32(gradients, Store::Overwrite, 1.0, Mat::new(a, len, len, CHUNK).t(), dout);
                column += width;
            }
        });
    });
}

simd_kernel! {
    /// `Aᵢⱼ = (qᵢ·kⱼ) exp(γᵢ − γⱼ)` for j ≤ i, and zeros.
    fn attention<S>(qk: &[f32], decay: &[f32], a: &mut [f32]) {
        let rows = a.chunks_exact_mut(CHUNK).zip(qk.chunks_exact(CHUNK));
        for (i, (now, (a, qk))) in decay.iter().zip(rows).enumerate() {
            let (seen, unseen) = a.split_at_mut(i + 1);
            for ((a, qk), before) in seen.iter_mut().zip(qk).zip(decay) {
                *a = qk * simd::exp::<S>(*now - before);
            }
            unseen.fill(0.0);
        }
    }
}
