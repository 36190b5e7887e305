//! The gradients of every chunk, once those of the updates and of the states are known.
//!
//! With the gradients dR of β∘errors, `dA = dO updatesᵀ` and `dL = −dR updatesᵀ`, each is a sum of a term within the chunk,
//! one from the state before it and one from the state behind it. A gradient of γᵢ − γⱼ counts for γᵢ, and negatively for
//! γⱼ; g is in all γ from its token to the end of the chunk.

use super::super::segments::{CHUNK, Chunk, Segment};
use super::buffers::{Block, HeadBuffers, KeyHead, ValueHead};
use super::scan::exponentials;
use super::{Gradients, HeadsMut, Problem, Sizes, Step, with_scratch};
use crate::cast::Float;
use crate::gemm::tile::TILE;
use crate::gemm::transposed::transpose_rows;
use crate::matrix::{Mat, MatMut, Store, multiply_f32};
use crate::simd::{self, simd_kernel};
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
        Self { dq: keys(dq), dk: keys(dk), dv, dg: gates(dg), dbeta: gates(dbeta), dskip }
    }
}

/// The lengths of the buffers of a task: the gradients of queries and keys; a term of one of them; two products of
/// gradients with transposed updates; transposed updates, gradients of β∘errors, and a state.
pub(super) fn scratch_lengths(sizes: &Sizes) -> [usize; 8] {
    let (keys, values) = (CHUNK * sizes.key_dim, CHUNK * sizes.value_dim);
    let state = sizes.value_dim * sizes.key_dim.next_multiple_of(TILE);
    [keys, keys, keys, CHUNK * CHUNK, CHUNK * CHUNK, values, values, state]
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
        with_scratch(scratch_lengths(&problem.sizes), |[dq, dk, term, da, dl, updates, gradients, state]| {
            let keys = chunk.tokens.len() * problem.sizes.key_dim;
            let (dq, dk) = (&mut dq[..keys], &mut dk[..keys]);
            dq.fill(0.0);
            dk.fill(0.0);
            let mut buffers = Buffers { dq, dk, term, da, dl, updates, gradients, state };
            for value in heads.values.iter().filter(|value| value.key == index) {
                let of_head = ChunkGradients::new(problem, key, value, segment, chunk);
                of_head.write(outputs, &mut buffers);
            }
            write_keys(problem, key, (segment, chunk), outputs, [buffers.dq, buffers.dk]);
        });
    });
}

/// Passes the gradients of queries and keys through the normalization of the delta rule.
fn write_keys<T: Float>(
    problem: &Problem<'_, T>,
    key: &KeyHead<'_>,
    (segment, chunk): (&Segment, &Chunk),
    outputs: &Outputs<'_, T>,
    [dq, dk]: [&mut [f32]; 2],
) {
    let (rows, dim, at) = (segment.rows(chunk), problem.sizes.key_dim, (key.sequence, key.head));
    let of_chunk = rows.start * dim..rows.end * dim;
    if problem.sizes.is_delta {
        let (q, k) = (&key.q[of_chunk.clone()], &key.k[of_chunk]);
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
    beta: &'a [f32],
    skip: Option<f32>,
    decays: [f32; CHUNK],
    decays_to_end: [f32; CHUNK],
    /// Gradients of γ, β and the skip connection.
    sums: Sums,
}

struct Sums {
    decay: [f32; CHUNK],
    beta: [f32; CHUNK],
    skip: [f32; CHUNK],
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
        let (mut decays, mut decays_to_end) = ([0.0; CHUNK], [0.0; CHUNK]);
        exponentials(decay, &mut decays, &mut decays_to_end);
        let sums = Sums { decay: [0.0; CHUNK], beta: [0.0; CHUNK], skip: [0.0; CHUNK] };
        let skip = problem.skip.map(|skip| skip[value.head]);
        Self { sizes, value, chunk, rows, q, k, qk, kk, decay, beta, skip, decays, decays_to_end, sums }
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

        let (at, len, tokens) = ((self.value.sequence, self.value.head), self.len(), &self.chunk.tokens);
        let mut sum = 0.0;
        for decay in self.sums.decay[..len].iter_mut().rev() {
            sum += *decay;
            *decay = sum;
        }
        // SAFETY: no other task has these tokens of this sequence and value head.
        unsafe { outputs.dg.head(at, tokens) }.round_from(&self.sums.decay[..len]);
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
                let rows = &rows[self.rows.start * width..];
                transpose_rows(
                    rows,
                    (self.len(), width),
                    width,
                    &mut into[block.columns.start * CHUNK..],
                    CHUNK,
                );
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
        let Buffers { dq, dk, da, dl, updates, gradients, .. } = buffers;
        let updates = self.transposed(updates);
        multiply_f32(MatMut::new(da, len, len, CHUNK), Store::Overwrite, 1.0, self.dout(), updates);
        let (q, k) = (self.keys(self.q), self.keys(self.k));
        if !self.sizes.is_delta {
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
        let (da, dl) = (Mat::new(da, len, len, CHUNK), Mat::new(dl, len, len, CHUNK));
        multiply_f32(self.keys_mut(dq), Store::Add, 1.0, da, k);
        multiply_f32(self.keys_mut(dk), Store::Add, 1.0, da.t(), q);
        multiply_f32(self.keys_mut(dk), Store::Add, 1.0, dl, k);
    }

    /// The gradients that come from reading the state before the chunk: for the output, and for the errors.
    fn through_state(&mut self, buffers: &mut Buffers<'_>) {
        let Buffers { dq, dk, term, gradients, state, .. } = buffers;
        let state = self.transposed_state(state, |block| block.slot(block.states, self.chunk.state));
        let (len, dim) = (self.len(), self.sizes.key_dim);
        multiply_f32(self.keys_mut(term), Store::Overwrite, 1.0, self.dout(), state);
        add_terms(term, &self.decays[..len], self.q, dim, dq, &mut self.sums.decay);
        if !self.sizes.is_delta {
            return;
        }
        multiply_f32(self.keys_mut(term), Store::Overwrite, -1.0, self.transposed(gradients).t(), state);
        let mut factors = self.decays;
        factors.iter_mut().zip(self.beta).for_each(|(factor, beta)| *factor *= beta);
        add_terms(term, &factors[..len], self.k, dim, dk, &mut self.sums.decay);
    }

    /// The gradients that come from the state behind the chunk.
    fn through_next_state(&mut self, buffers: &mut Buffers<'_>) {
        let Buffers { dk, term, updates, state, .. } = buffers;
        let dstate = self.transposed_state(state, |block| block.slot(block.dstates, self.chunk.dstate));
        let (len, dim) = (self.len(), self.sizes.key_dim);
        multiply_f32(self.keys_mut(term), Store::Overwrite, 1.0, self.transposed(updates).t(), dstate);
        let mut dots = [0.0; CHUNK];
        add_terms(term, &self.decays_to_end[..len], self.k, dim, dk, &mut dots);
        let mut of_end: f32 = dots.iter().sum();
        for block in &self.value.blocks {
            let slots =
                (block.slot(block.states, self.chunk.state), block.slot(block.dstates, self.chunk.dstate));
            if let (Some(state), Some(dstate)) = slots {
                of_end += self.decays[len - 1] * dot(state, dstate);
            }
        }
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
            transpose_rows(state(block).unwrap_or_default(), (dim, width), width, into, stride);
        }
        Mat::new(into, self.sizes.value_dim, dim, stride)
    }

    /// Writes the gradient of the values, and adds those of the rates and of the skip connection.
    fn write_values<T: Float>(&mut self, outputs: &Outputs<'_, T>, row: &mut [f32]) {
        let at = (self.value.sequence, self.value.head);
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

/// The factors of A and L.
#[derive(Clone, Copy)]
struct Products<'a> {
    qk: &'a [f32],
    kk: &'a [f32],
    decay: &'a [f32],
    beta: &'a [f32],
}

simd_kernel! {
    /// Replaces the gradient of A by that of the products of queries and keys, and the gradient of L by that of the
    /// products of keys, symmetric. Adds the gradients of γ and β.
    fn pair_gradients<S>(products: Products<'_>, da: &mut [f32], dl: &mut [f32], sums: &mut Sums) {
        let Products { qk, kk, decay, beta } = products;
        let len = decay.len();
        for i in 0..len {
            let row = i * CHUNK..i * CHUNK + CHUNK;
            let (da, dl) = (&mut da[row.clone()], &mut dl[row.clone()]);
            let (qk, kk) = (&qk[row.clone()], &kk[row]);
            let mut of_beta = 0.0;
            let mut of_decay = 0.0;
            for j in 0..i {
                let factor = simd::exp::<S>(decay[i] - decay[j]);
                let (of_qk, of_kk) = (da[j] * factor, dl[j] * factor);
                (da[j], dl[j]) = (of_qk, beta[i] * of_kk);
                let of_pair = S::mul_add(of_qk, qk[j], beta[i] * of_kk * kk[j]);
                of_beta = S::mul_add(of_kk, kk[j], of_beta);
                of_decay += of_pair;
                sums.decay[j] -= of_pair;
            }
            sums.decay[i] += of_decay;
            sums.beta[i] += of_beta;
            dl[i] = 0.0;
            da[i + 1..len].fill(0.0);
        }
        for i in 0..len {
            for j in 0..i {
                dl[j * CHUNK + i] = dl[i * CHUNK + j];
            }
        }
    }
}

simd_kernel! {
    /// Replaces the gradient of A by that of the products of queries and keys. Adds that of γ.
    fn attention_gradients<S>(qk: &[f32], decay: &[f32], da: &mut [f32], of_decay: &mut [f32; CHUNK]) {
        let len = decay.len();
        for (i, (da, qk)) in da.chunks_exact_mut(CHUNK).zip(qk.chunks_exact(CHUNK)).take(len).enumerate() {
            let mut sum = 0.0;
            for j in 0..i {
                da[j] *= simd::exp::<S>(decay[i] - decay[j]);
                let of_pair = da[j] * qk[j];
                sum += of_pair;
                of_decay[j] -= of_pair;
            }
            of_decay[i] += sum;
            da[i + 1..len].fill(0.0);
        }
    }
}

simd_kernel! {
    /// Adds `factors∘terms` to a gradient, and its products with the rows to `dots`.
    fn add_terms<S>(terms: &[f32], factors: &[f32], rows: &[f32], dim: usize, into: &mut [f32], dots: &mut [f32]) {
        let rows = rows.chunks_exact(dim).zip(into.chunks_exact_mut(dim));
        for (((term, factor), (row, into)), sum) in terms.chunks_exact(dim).zip(factors).zip(rows).zip(dots) {
            *sum = S::mul_add(*factor, simd::dot::<S>(term, row), *sum);
            for (into, term) in into.iter_mut().zip(term) {
                *into = S::mul_add(*factor, *term, *into);
            }
        }
    }
}

simd_kernel! {
    fn dot<S>(a: &[f32], b: &[f32]) -> f32 {
        simd::dot::<S>(a, b)
    }
}

simd_kernel! {
    /// The gradient of x for that of the rows `scale · x / |x|`.
    fn normalize_backward<S>(rows: &[f32], dim: usize, scale: f32, inverse_norms: &[f32], gradients: &mut [f32]) {
        let rows = rows.chunks_exact(dim).zip(gradients.chunks_exact_mut(dim));
        for ((row, gradient), inverse_norm) in rows.zip(inverse_norms) {
            let along = simd::dot::<S>(row, gradient) / scale;
            for (gradient, x) in gradient.iter_mut().zip(row) {
                *gradient = inverse_norm * S::mul_add(-along, *x, scale * *gradient);
            }
        }
    }
}
