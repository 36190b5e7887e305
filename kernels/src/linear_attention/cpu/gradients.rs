//! The gradients of every chunk, once those of the updates and of the states are known.
//!
//! With the gradients dR of β∘errors, `dA = dO updatesᵀ` and `dL = −dR updatesᵀ`, each is a sum of a term within the chunk,
//! one from the state before it and one from the state behind it. A gradient of γᵢ − γⱼ counts for γᵢ, and negatively for
//! γⱼ; g is in all γ from its token to the end of the chunk.

use super::super::segments::{CHUNK, Chunk, Segment};
use super::buffers::{Block, HeadBuffers, KeyHead, ValueHead};
use super::channels::{self, PairGradients, RowGradients};
use super::rows::{Products, Sums, add_terms, attention_gradients, dot, normalize_backward, pair_gradients};
use super::scan::exponentials;
use super::{Gradients, HeadsMut, Problem, Sizes, Step, with_scratch};
use crate::cast::Float;
use crate::gemm::tile::TILE;
use crate::gemm::transposed::transpose_rows;
use crate::matrix::{HeadAt, Mat, MatMut, Store, multiply_f32};
use rayon::prelude::*;
use std::ops::Range;

/// The outputs, in which each task writes its own tokens and heads.
pub(super) struct Outputs<'a, T> {
    dq: HeadsMut<'a, T>,
    dk: HeadsMut<'a, T>,
    dv: HeadsMut<'a, T>,
    dg: HeadsMut<'a, f32>,
    dbeta: HeadsMut<'a, f32>,
    dskip: Option<HeadsMut<'a, f32>>,
}

impl<'a, T> Outputs<'a, T> {
    pub(super) fn new(sizes: &Sizes, gradients: Gradients<'a, T>) -> Self {
        let Gradients { dq, dk, dv, dg, dbeta, dskip } = gradients;
        let keys = |elements| HeadsMut::new(elements, sizes.seq_len, sizes.key_heads, sizes.key_dim);
        let gates = |elements| HeadsMut::new(elements, sizes.seq_len, sizes.value_heads, 1);
        let (dv, dskip) = (sizes.values_mut(dv), dskip.map(gates));
        let [heads, dim] = sizes.decay_heads();
        let dg = HeadsMut::new(dg, sizes.seq_len, heads, dim);
        Self { dq: keys(dq), dk: keys(dk), dv, dg, dbeta: gates(dbeta), dskip }
    }
}

/// The lengths of the buffers of a task: the gradients of queries and keys; a term of one of them; two products of
/// gradients with transposed updates; transposed updates, gradients of β∘errors, and a state; with decays per channel the
/// gradients of stored keys, and of the decays to the end of the chunk.
pub(super) fn scratch_lengths(sizes: &Sizes) -> [usize; 10] {
    let (keys, values) = (CHUNK * sizes.key_dim, CHUNK * sizes.value_dim);
    let state = sizes.value_dim * sizes.key_dim.next_multiple_of(TILE);
    let [stored, end] = [keys, sizes.key_dim].map(|elems| sizes.of_channels(elems));
    [keys, keys, keys, CHUNK * CHUNK, CHUNK * CHUNK, values, values, state, stored, end]
}

/// Writes the gradients of all chunks.
pub(super) fn chunks<T: Float>(
    problem: &Problem<'_, T>,
    heads: &HeadBuffers<'_>,
    step: &Step<'_>,
    outputs: &Outputs<'_, T>,
) {
    let mut tasks = Vec::new();
    for (index, key) in heads.keys.iter().enumerate() {
        let Some(segment) = step.segment(key.sequence) else { continue };
        tasks.extend(segment.chunks.iter().map(|chunk| (index, key, segment, chunk)));
    }
    tasks.into_par_iter().for_each(|(index, key, segment, chunk)| {
        with_scratch(scratch_lengths(&problem.sizes), |buffers| {
            let [dq, dk, term, da, dl, updates, gradients, state, dstored, dend] = buffers;
            let keys = chunk.tokens.len() * problem.sizes.key_dim;
            let (dq, dk, dstored) =
                (&mut dq[..keys], &mut dk[..keys], &mut dstored[..problem.sizes.of_channels(keys)]);
            let dend = &mut dend[..problem.sizes.of_channels(problem.sizes.key_dim)];
            [&mut *dq, dk, dstored, dend].into_iter().for_each(|gradient| gradient.fill(0.0));
            let mut buffers = Buffers { dq, dk, term, da, dl, updates, gradients, state, dstored, dend };
            for value in heads.values.iter().filter(|value| value.key == index) {
                let of_head = ChunkGradients::new(problem, key, value, segment, chunk);
                of_head.write(outputs, &mut buffers);
            }
            write_keys(problem, key, segment, chunk, outputs, &mut buffers);
        });
    });
}

/// Passes the gradients of queries and keys through the normalization of the delta rule, and writes those of decays per channel.
fn write_keys<T: Float>(
    problem: &Problem<'_, T>,
    key: &KeyHead<'_>,
    segment: &Segment,
    chunk: &Chunk,
    outputs: &Outputs<'_, T>,
    buffers: &mut Buffers<'_>,
) {
    let (rows, dim) = (segment.rows(chunk), problem.sizes.key_dim);
    let at = HeadAt { sequence: key.sequence, head: key.head };
    let of_chunk = rows.start * dim..rows.end * dim;
    let (q, k) = (&key.q[of_chunk.clone()], &key.k[of_chunk.clone()]);
    let Buffers { dq, dk, term: dg, dstored, dend, .. } = buffers;
    if problem.sizes.rule.has_channel_decays() {
        channels::finish(q, k, &mut RowGradients { q: dq, k: dk, stored: dstored, end: dend }, dg);
        // SAFETY: no other task has these tokens of this sequence and key head.
        unsafe { outputs.dg.head(at, &chunk.tokens) }.round_from(dg);
    }
    if problem.sizes.rule.is_delta() {
        normalize_backward(q, dim, problem.query_scale(), &key.q_inverse_norms[rows.clone()], dq);
        normalize_backward(k, dim, 1.0, &key.k_inverse_norms[rows], dk);
    }
    // SAFETY: no other task has these tokens of this sequence and key head.
    unsafe { outputs.dq.head(at, &chunk.tokens) }.round_from(dq);
    // SAFETY: as above.
    unsafe { outputs.dk.head(at, &chunk.tokens) }.round_from(dk);
}

/// The buffers of a task, as [`scratch_lengths`] lists them.
struct Buffers<'a> {
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    term: &'a mut [f32],
    da: &'a mut [f32],
    dl: &'a mut [f32],
    updates: &'a mut [f32],
    gradients: &'a mut [f32],
    state: &'a mut [f32],
    dstored: &'a mut [f32],
    dend: &'a mut [f32],
}

/// A chunk of one value head.
struct ChunkGradients<'a, 'b> {
    sizes: &'a Sizes,
    value: &'a ValueHead<'b>,
    chunk: &'a Chunk,
    rows: Range<usize>,
    q: &'a [f32],
    k: &'a [f32],
    qk: &'a [f32],
    kk: &'a [f32],
    decay: &'a [f32],
    /// γ per channel, `[tokens, Dk]`.
    channels: Option<&'a [f32]>,
    beta: &'a [f32],
    skip: Option<f32>,
    decays: [f32; CHUNK],
    decays_to_end: [f32; CHUNK],
    /// Gradients of γ, β and the skip connection.
    sums: Sums,
}

impl<'a, 'b> ChunkGradients<'a, 'b> {
    fn new<T: Float>(
        problem: &'a Problem<'_, T>,
        key: &'a KeyHead<'_>,
        value: &'a ValueHead<'b>,
        segment: &Segment,
        chunk: &'a Chunk,
    ) -> Self {
        let (sizes, rows) = (&problem.sizes, segment.rows(chunk));
        let of =
            |rows_of_segment: &'a [f32], width: usize| &rows_of_segment[rows.start * width..rows.end * width];
        let (q, k) = (of(key.q, sizes.key_dim), of(key.k, sizes.key_dim));
        let (qk, kk) = (of(key.qk, CHUNK), of(key.kk, sizes.of_delta(CHUNK)));
        let (decay, beta) = (of(value.decay, 1), of(value.beta, 1));
        let channels = key.channels.as_ref().map(|channels| of(channels.decay, sizes.key_dim));
        let (mut decays, mut decays_to_end) = ([0.0; CHUNK], [0.0; CHUNK]);
        exponentials(decay, &mut decays, &mut decays_to_end);
        let sums = Sums { decay: [0.0; CHUNK], beta: [0.0; CHUNK], skip: [0.0; CHUNK] };
        let skip = problem.skip.map(|skip| skip[value.head]);
        Self {
            sizes,
            value,
            chunk,
            rows,
            q,
            k,
            qk,
            kk,
            decay,
            channels,
            beta,
            skip,
            decays,
            decays_to_end,
            sums,
        }
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    /// Writes the gradients of values, rates and decays, and adds those of queries and keys.
    fn write<T: Float>(mut self, outputs: &Outputs<'_, T>, buffers: &mut Buffers<'_>) {
        self.transpose(buffers);
        self.through_pairs(buffers);
        if self.chunk.state.is_some() {
            self.through_state(buffers);
        }
        if self.chunk.dstate.is_some() {
            self.through_next_state(buffers);
        }
        self.write_values(outputs, buffers.term);

        let at = HeadAt { sequence: self.value.sequence, head: self.value.head };
        let (len, tokens) = (self.len(), &self.chunk.tokens);
        if self.channels.is_none() {
            let mut sum = 0.0;
            for decay in self.sums.decay[..len].iter_mut().rev() {
                sum += *decay;
                *decay = sum;
            }
            // SAFETY: no other task has these tokens of this sequence and value head.
            unsafe { outputs.dg.head(at, tokens) }.round_from(&self.sums.decay[..len]);
        }
        // SAFETY: as above.
        unsafe { outputs.dbeta.head(at, tokens) }.round_from(&self.sums.beta[..len]);
        if let Some(dskip) = &outputs.dskip {
            // SAFETY: as above.
            unsafe { dskip.head(at, tokens) }.round_from(&self.sums.skip[..len]);
        }
    }

    /// Updates and gradients of β∘errors, `[Dv, CHUNK]`.
    fn transpose(&self, buffers: &mut Buffers<'_>) {
        for block in &self.value.blocks {
            let width = block.columns.len();
            for (rows, into) in
                [(&*block.updates, &mut *buffers.updates), (&*block.gradients, &mut *buffers.gradients)]
            {
                let (rows, into) =
                    (&rows[self.rows.start * width..], &mut into[block.columns.start * CHUNK..]);
                transpose_rows(rows, width, into, CHUNK, [self.len(), width]);
            }
        }
    }

    /// A matrix of the whole values of the chunk, from its transposed rows.
    fn transposed<'r>(&self, columns: &'r [f32]) -> Mat<'r> {
        Mat::new(columns, self.sizes.value_dim, self.len(), CHUNK)
    }

    fn dout(&self) -> Mat<'a> {
        let dim = self.sizes.value_dim;
        Mat::new(&self.value.dout[self.rows.start * dim..], self.len(), dim, dim)
    }

    fn keys_mut<'r>(&self, rows: &'r mut [f32]) -> MatMut<'r> {
        MatMut::new(rows, self.len(), self.sizes.key_dim, self.sizes.key_dim)
    }

    fn keys<'r>(&self, rows: &'r [f32]) -> Mat<'r> {
        Mat::new(rows, self.len(), self.sizes.key_dim, self.sizes.key_dim)
    }

    /// The gradients that come from A and L.
    fn through_pairs(&mut self, buffers: &mut Buffers<'_>) {
        let len = self.len();
        let Buffers { dq, dk, da, dl, updates, gradients, dstored, dend, .. } = buffers;
        let updates = self.transposed(updates);
        multiply_f32(MatMut::new(da, len, len, CHUNK), Store::Overwrite, 1.0, self.dout(), updates);
        let (q, k) = (self.keys(self.q), self.keys(self.k));
        if !self.sizes.rule.is_delta() {
            attention_gradients(self.qk, self.decay, da, &mut self.sums.decay);
            let da = Mat::new(da, len, len, CHUNK);
            multiply_f32(self.keys_mut(dq), Store::Add, 1.0, da, k);
            multiply_f32(self.keys_mut(dk), Store::Add, 1.0, da.t(), q);
            return;
        }
        let of_l = MatMut::new(dl, len, len, CHUNK);
        multiply_f32(of_l, Store::Overwrite, -1.0, self.transposed(gradients).t(), updates);
        let products = Products { qk: self.qk, kk: self.kk, decay: self.decay, beta: self.beta };
        pair_gradients(products, da, dl, &mut self.sums);
        if let Some(decay) = self.channels {
            let pairs = PairGradients { qk: da, kk: dl };
            let mut into = RowGradients { q: dq, k: dk, stored: dstored, end: dend };
            channels::add_pair_gradients(self.q, self.k, decay, self.sizes.key_dim, &pairs, &mut into);
            return;
        }
        let (da, dl) = (Mat::new(da, len, len, CHUNK), Mat::new(dl, len, len, CHUNK));
        multiply_f32(self.keys_mut(dq), Store::Add, 1.0, da, k);
        multiply_f32(self.keys_mut(dk), Store::Add, 1.0, da.t(), q);
        multiply_f32(self.keys_mut(dk), Store::Add, 1.0, dl, k);
    }

    /// The gradients that come from reading the state before the chunk: for the output, and for the errors.
    fn through_state(&mut self, buffers: &mut Buffers<'_>) {
        let Buffers { dq, dk, term, gradients, state, .. } = buffers;
        let state = self.transposed_state(state, |block| block.slot(block.states, self.chunk.state));
        multiply_f32(self.keys_mut(term), Store::Overwrite, 1.0, self.dout(), state);
        self.add_read(term, self.decays, self.q, dq);
        if !self.sizes.rule.is_delta() {
            return;
        }
        multiply_f32(self.keys_mut(term), Store::Overwrite, -1.0, self.transposed(gradients).t(), state);
        let mut factors = self.decays;
        factors.iter_mut().zip(self.beta).for_each(|(factor, beta)| *factor *= beta);
        self.add_read(term, factors, self.k, dk);
    }

    /// Adds the gradients of rows that read the state, whose factors are these and exp(γ) of the channels.
    fn add_read(&mut self, terms: &[f32], factors: [f32; CHUNK], rows: &[f32], into: &mut [f32]) {
        let (dim, factors) = (self.sizes.key_dim, &factors[..self.len()]);
        match self.channels {
            None => add_terms(terms, factors, rows, dim, into, &mut self.sums.decay),
            Some(decay) => channels::add_decayed(terms, decay, factors, dim, into),
        }
    }

    /// The gradients that come from the state behind the chunk.
    fn through_next_state(&mut self, buffers: &mut Buffers<'_>) {
        let Buffers { dq, dk, term, updates, state, dstored, dend, .. } = buffers;
        let dstate = self.transposed_state(state, |block| block.slot(block.dstates, self.chunk.dstate));
        let (len, dim) = (self.len(), self.sizes.key_dim);
        multiply_f32(self.keys_mut(term), Store::Overwrite, 1.0, self.transposed(updates).t(), dstate);
        let decayed_states = self.value.blocks.iter().filter_map(|block| {
            let state = block.slot(block.states, self.chunk.state)?;
            Some((state, block.slot(block.dstates, self.chunk.dstate)?))
        });
        if let Some(decay) = self.channels {
            let mut into = RowGradients { q: dq, k: dk, stored: dstored, end: dend };
            channels::add_stored(term, self.k, decay, &mut into);
            let end = &decay[(len - 1) * dim..];
            decayed_states.for_each(|(state, dstate)| {
                channels::add_decay_of_state(state, dstate, end, into.end);
            });
            return;
        }
        let mut dots = [0.0; CHUNK];
        add_terms(term, &self.decays_to_end[..len], self.k, dim, dk, &mut dots);
        let of_states = decayed_states.map(|(state, dstate)| self.decays[len - 1] * dot(state, dstate));
        let of_end = dots.iter().sum::<f32>() + of_states.sum::<f32>();
        self.sums.decay.iter_mut().zip(dots).for_each(|(sum, dot)| *sum -= dot);
        self.sums.decay[len - 1] += of_end;
    }

    /// A state `[Dv, Dk]` from its blocks of columns.
    fn transposed_state<'r>(
        &self,
        into: &'r mut [f32],
        state: impl Fn(&'a Block<'b>) -> Option<&'a [f32]>,
    ) -> Mat<'r> {
        let (dim, stride) = (self.sizes.key_dim, self.sizes.key_dim.next_multiple_of(TILE));
        for block in &self.value.blocks {
            let width = block.columns.len();
            let into = &mut into[block.columns.start * stride..];
            transpose_rows(state(block).unwrap_or_default(), width, into, stride, [dim, width]);
        }
        Mat::new(into, self.sizes.value_dim, dim, stride)
    }

    /// Writes the gradient of the values, and adds those of the rates and of the skip connection.
    fn write_values<T: Float>(&mut self, outputs: &Outputs<'_, T>, row: &mut [f32]) {
        let at = HeadAt { sequence: self.value.sequence, head: self.value.head };
        // SAFETY: no other task has these tokens of this sequence and value head.
        let mut dv = unsafe { outputs.dv.head(at, &self.chunk.tokens) };
        let dim = self.sizes.value_dim;
        for block in &self.value.blocks {
            let width = block.columns.len();
            for (token, row_of_segment) in self.rows.clone().enumerate() {
                let row_of_block = row_of_segment * width..(row_of_segment + 1) * width;
                let (gradients, errors) =
                    (&block.gradients[row_of_block.clone()], &block.errors[row_of_block]);
                self.sums.beta[token] += dot(gradients, errors);
                let row = &mut row[..width];
                row.iter_mut().zip(gradients).for_each(|(row, gradient)| *row = self.beta[token] * gradient);
                if let Some(skip) = self.skip {
                    let dout = &self.value.dout[row_of_segment * dim..][block.columns.clone()];
                    row.iter_mut().zip(dout).for_each(|(row, dout)| *row += skip * dout);
                    self.sums.skip[token] += dot(dout, errors);
                }
                T::round(row, &mut dv.row(token)[block.columns.clone()]);
            }
        }
    }
}
