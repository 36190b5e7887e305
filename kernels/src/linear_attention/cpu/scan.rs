//! The recurrence over the chunks of a segment, forward and in reverse, for one block of columns per task.

use super::super::segments::{CHUNK, Chunk, Segment};
use super::buffers::{Block, COLUMNS, HeadBuffers, KeyHead, ValueHead};
use super::channels;
use super::{Problem, Sizes, Step, with_scratch};
use crate::cast::Float;
use crate::matrix::{HeadAt, Mat, MatMut, Store, multiply_f32};
use crate::simd::{self, simd_kernel};
use rayon::prelude::*;
use std::ops::Range;

/// The states that a forward pass saves, per block of columns.
pub(super) enum Saved<'a, 'b> {
    /// Of a forward pass.
    Write(&'a mut [&'b mut [f32]]),
    /// Of a backward pass, which computes a segment again.
    Read(&'a [&'b [f32]]),
}

/// The lengths of the buffers of a task: two for a value or gradient per token.
pub(super) fn scratch_lengths() -> [usize; 2] {
    [CHUNK * COLUMNS; 2]
}

/// Writes errors and updates, and the states before chunks.
pub(super) fn forward<T: Float>(
    problem: &Problem<'_, T>,
    heads: &mut HeadBuffers<'_>,
    step: &Step<'_>,
    saved: Saved<'_, '_>,
) {
    restore_states(heads, step, saved);
    for_each_block(heads, step, |task, block| {
        with_scratch(scratch_lengths(), |mut buffers| {
            for chunk in &task.segment.chunks {
                task.chunk(chunk).forward(problem, block, buffers.each_mut().map(|buffer| &mut **buffer));
            }
        });
    });
}

/// Writes the gradients of β · errors over those of the outputs' share of the updates, and the gradients of the states
/// behind chunks.
pub(super) fn backward<T: Float>(problem: &Problem<'_, T>, heads: &mut HeadBuffers<'_>, step: &Step<'_>) {
    for_each_block(heads, step, |task, block| {
        with_scratch(scratch_lengths(), |mut buffers| {
            for chunk in task.segment.chunks.iter().rev() {
                task.chunk(chunk).backward(
                    &problem.sizes,
                    block,
                    buffers.each_mut().map(|buffer| &mut **buffer),
                );
            }
        });
    });
}

/// Copies states that are needed between segments.
fn restore_states(heads: &mut HeadBuffers<'_>, step: &Step<'_>, mut saved: Saved<'_, '_>) {
    let blocks = heads.values.iter_mut().flat_map(|value| {
        let sequence = value.sequence;
        value.blocks.iter_mut().map(move |block| (sequence, block))
    });
    for (index, (sequence, block)) in blocks.enumerate() {
        let Some(saved_index) = step.segment(sequence).and_then(|segment| segment.saved) else { continue };
        let range = saved_index * block.state.len()..(saved_index + 1) * block.state.len();
        match &mut saved {
            Saved::Read(states) => block.state.copy_from_slice(&states[index][range]),
            Saved::Write(states) => {
                if let Some(saved) = states[index].get_mut(range) {
                    saved.copy_from_slice(block.state);
                }
            }
        }
    }
}

/// A block of columns of a segment.
struct Task<'a, 'b> {
    at: HeadAt,
    segment: &'a Segment,
    key: &'a KeyHead<'b>,
    decay: &'a [f32],
    beta: &'a [f32],
    inverse: &'a [f32],
    dout: &'a [f32],
}

fn for_each_block(
    heads: &mut HeadBuffers<'_>,
    step: &Step<'_>,
    work: impl Fn(&Task<'_, '_>, &mut Block<'_>) + Sync,
) {
    let HeadBuffers { keys, values } = heads;
    let mut tasks = Vec::new();
    for value in values {
        let ValueHead { sequence, head, key, decay, beta, inverse, dout, blocks } = value;
        let Some(segment) = step.segment(*sequence) else { continue };
        let (at, key) = (HeadAt { sequence: *sequence, head: *head }, &keys[*key]);
        let task = || Task { at, segment, key, decay, beta, inverse, dout };
        tasks.extend(blocks.iter_mut().map(|block| (task(), block)));
    }
    tasks.into_par_iter().for_each(|(task, block)| work(&task, block));
}

/// A chunk of a [`Task`].
struct ChunkTask<'a, 'b> {
    task: &'a Task<'a, 'b>,
    chunk: &'a Chunk,
    rows: Range<usize>,
    beta: &'a [f32],
    /// exp(γ)
    decays: [f32; CHUNK],
    /// exp(γ_end − γ)
    decays_to_end: [f32; CHUNK],
}

impl<'b> Task<'_, 'b> {
    fn chunk<'a>(&'a self, chunk: &'a Chunk) -> ChunkTask<'a, 'b> {
        let rows = self.segment.rows(chunk);
        let (decay, beta) = (&self.decay[rows.clone()], &self.beta[rows.clone()]);
        let (mut decays, mut decays_to_end) = ([0.0; CHUNK], [0.0; CHUNK]);
        exponentials(decay, &mut decays, &mut decays_to_end);
        ChunkTask { task: self, chunk, rows, beta, decays, decays_to_end }
    }
}

impl ChunkTask<'_, '_> {
    fn len(&self) -> usize {
        self.rows.len()
    }

    /// Rows of the chunk in a buffer of a segment.
    fn rows<'r>(&self, rows: &'r [f32], width: usize) -> &'r [f32] {
        &rows[self.rows.start * width..self.rows.end * width]
    }

    /// As [`rows`](Self::rows), as a matrix.
    fn matrix<'r>(&self, rows: &'r [f32], width: usize) -> Mat<'r> {
        Mat::new(self.rows(rows, width), self.len(), width, width)
    }

    /// (I + L)⁻¹
    fn inverse(&self) -> Mat<'_> {
        Mat::new(self.rows(self.task.inverse, CHUNK), self.len(), self.len(), CHUNK)
    }

    /// Decays a state, `[dim, width]`, over the chunk.
    fn decay(&self, state: &mut [f32], dim: usize) {
        match self.task.key.channel_decay(self.rows.end, dim) {
            None => scale(state, self.decays[self.len() - 1]),
            Some(end) => channels::decay_state(state, end, state.len() / dim),
        }
    }

    fn forward<T: Float>(&self, problem: &Problem<'_, T>, block: &mut Block<'_>, [a, b]: [&mut [f32]; 2]) {
        let (len, width, dim) = (self.len(), block.columns.len(), problem.sizes.key_dim);
        let range = self.rows.start * width..self.rows.end * width;
        let (errors, updates) = (&mut block.errors[range.clone()], &mut block.updates[range]);
        let values = problem.v.head(self.task.at, &self.chunk.tokens).columns(block.columns.clone());
        let [_, k, stored] = self.task.key.rows_of_state().map(|rows| self.matrix(rows, dim));
        match self.chunk.state {
            None => block.state.fill(0.0),
            Some(slot) => block.states[slot * dim * width..][..dim * width].copy_from_slice(block.state),
        }
        match self.chunk.state.filter(|_| problem.sizes.rule.is_delta()) {
            None => _ = values.gather_f32(errors),
            Some(_) => {
                values.gather_f32(a);
                let state = Mat::new(block.state, dim, width, width);
                multiply_f32(MatMut::new(errors, len, width, width), Store::Overwrite, 1.0, k, state);
                subtract_recalled(errors, a, &self.decays, width);
            }
        }
        if problem.sizes.rule.is_delta() {
            scale_rows(errors, self.beta, b, width);
            let scaled = Mat::new(b, len, width, width);
            let updates = MatMut::new(updates, len, width, width);
            multiply_f32(updates, Store::Overwrite, 1.0, self.inverse(), scaled);
        } else {
            scale_rows(errors, self.beta, updates, width);
        }
        if self.chunk.dstate.is_some() {
            scale_rows(updates, &self.decays_to_end, b, width);
            self.decay(block.state, dim);
            let state = MatMut::new(block.state, dim, width, width);
            multiply_f32(state, Store::Add, 1.0, stored.t(), Mat::new(b, len, width, width));
        }
    }

    fn backward(&self, sizes: &Sizes, block: &mut Block<'_>, [a, b]: [&mut [f32]; 2]) {
        let (len, width) = (self.len(), block.columns.len());
        let dim = block.state.len() / width;
        let gradients = &mut block.gradients[self.rows.start * width..self.rows.end * width];
        let [q, k, stored] = self.task.key.rows_of_state().map(|rows| self.matrix(rows, dim));
        match self.chunk.dstate {
            None => block.dstate.fill(0.0),
            Some(slot) => {
                block.dstates[slot * dim * width..][..dim * width].copy_from_slice(block.dstate);
                let dstate = Mat::new(block.dstate, dim, width, width);
                multiply_f32(MatMut::new(a, len, width, width), Store::Overwrite, 1.0, stored, dstate);
                add_scaled_rows(gradients, a, &self.decays_to_end, width);
            }
        }
        if sizes.rule.is_delta() {
            let (into, dupdates) =
                (MatMut::new(a, len, width, width), Mat::new(gradients, len, width, width));
            multiply_f32(into, Store::Overwrite, 1.0, self.inverse().t(), dupdates);
            gradients.copy_from_slice(&a[..len * width]);
        }
        if self.chunk.state.is_some() {
            self.decay(block.dstate, dim);
            self.matrix(self.task.dout, sizes.value_dim).columns(block.columns.clone()).gather_f32(a);
            scale_rows_in_place(a, &self.decays[..len], width);
            let mut dstate = |lhs: Mat<'_>, rows: &[f32], sign| {
                let dstate = MatMut::new(block.dstate, dim, width, width);
                multiply_f32(dstate, Store::Add, sign, lhs.t(), Mat::new(rows, len, width, width));
            };
            dstate(q, a, 1.0);
            if sizes.rule.is_delta() {
                scale_rows(gradients, self.beta, b, width);
                scale_rows_in_place(b, &self.decays[..len], width);
                dstate(k, b, -1.0);
            }
        }
    }
}

simd_kernel! {
    /// exp(γ), and exp(γ_end − γ).
    pub(super) fn exponentials<S>(decay: &[f32], decays: &mut [f32; CHUNK], decays_to_end: &mut [f32; CHUNK]) {
        let end = decay[decay.len() - 1];
        for ((decay, of_start), to_end) in decay.iter().zip(decays).zip(decays_to_end) {
            *of_start = simd::exp::<S>(*decay);
            *to_end = simd::exp::<S>(end - *decay);
        }
    }
}

simd_kernel! {
    /// errors = values − factors∘errors
    fn subtract_recalled<S>(errors: &mut [f32], values: &[f32], factors: &[f32], width: usize) {
        for ((errors, values), factor) in errors.chunks_exact_mut(width).zip(values.chunks_exact(width)).zip(factors) {
            for (error, value) in errors.iter_mut().zip(values) {
                *error = S::mul_add(-*factor, *error, *value);
            }
        }
    }
}

simd_kernel! {
    /// into = factors∘rows
    pub(super) fn scale_rows<S>(rows: &[f32], factors: &[f32], into: &mut [f32], width: usize) {
        for ((row, into), factor) in rows.chunks_exact(width).zip(into.chunks_exact_mut(width)).zip(factors) {
            for (into, x) in into.iter_mut().zip(row) {
                *into = factor * x;
            }
        }
    }
}

simd_kernel! {
    /// rows = factors∘rows
    pub(super) fn scale_rows_in_place<S>(rows: &mut [f32], factors: &[f32], width: usize) {
        for (row, factor) in rows.chunks_exact_mut(width).zip(factors) {
            for x in row.iter_mut() {
                *x *= factor;
            }
        }
    }
}

simd_kernel! {
    /// into += factors∘rows
    fn add_scaled_rows<S>(into: &mut [f32], rows: &[f32], factors: &[f32], width: usize) {
        for ((into, row), factor) in into.chunks_exact_mut(width).zip(rows.chunks_exact(width)).zip(factors) {
            for (into, x) in into.iter_mut().zip(row) {
                *into = S::mul_add(*factor, *x, *into);
            }
        }
    }
}

simd_kernel! {
    fn scale<S>(values: &mut [f32], factor: f32) {
        for value in values.iter_mut() {
            *value *= factor;
        }
    }
}
