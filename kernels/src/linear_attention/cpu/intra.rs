//! The part of a chunk that does not depend on the state: normalized queries and keys, their products, and (I + L)⁻¹.

use super::super::segments::CHUNK;
use super::buffers::{ChannelRows, HeadBuffers, by_chunk};
use super::channels::{decay_rows, pair_products};
use super::{Problem, Sizes, Step, with_scratch};
use crate::cast::Float;
use crate::gemm::transposed::transpose_rows;
use crate::linear_attention::NORM_EPS;
use crate::matrix::{HeadAt, Mat, MatMut, Store, multiply_f32};
use crate::simd::{self, simd_kernel};
use rayon::prelude::*;
use std::ops::Range;

/// A chunk of a key head.
struct KeyTask<'a> {
    at: HeadAt,
    tokens: Range<usize>,
    q: &'a mut [f32],
    k: &'a mut [f32],
    q_inverse_norms: &'a mut [f32],
    k_inverse_norms: &'a mut [f32],
    qk: &'a mut [f32],
    kk: &'a mut [f32],
    channels: Option<ChannelRows<'a>>,
}

/// A chunk of a value head.
struct ValueTask<'a> {
    at: HeadAt,
    tokens: Range<usize>,
    /// The products of the chunk's keys.
    kk: &'a [f32],
    decay: &'a mut [f32],
    beta: &'a mut [f32],
    inverse: &'a mut [f32],
}

/// Fills the parts of the buffers that do not depend on states.
pub(super) fn prepare<T: Float>(problem: &Problem<'_, T>, heads: &mut HeadBuffers<'_>, step: &Step<'_>) {
    let mut tasks = Vec::new();
    for key in &mut heads.keys {
        let Some(segment) = step.segment(key.sequence) else { continue };
        let (at, dim) = (HeadAt { sequence: key.sequence, head: key.head }, problem.sizes.key_dim);
        let of_delta = |width| problem.sizes.of_delta(width);
        let norms = [&mut *key.q_inverse_norms, &mut *key.k_inverse_norms];
        let [q_norms, k_norms] = norms.map(|norms| (norms, of_delta(1)));
        let rows = [
            (&mut *key.q, dim),
            (&mut *key.k, dim),
            q_norms,
            k_norms,
            (&mut *key.qk, CHUNK),
            (&mut *key.kk, of_delta(CHUNK)),
        ];
        let mut channels = key.channels.as_mut().map(|rows| rows.by_chunk(dim, segment));
        for (chunk, rows) in segment.chunks.iter().zip(by_chunk(rows, segment)) {
            let [q, k, q_inverse_norms, k_inverse_norms, qk, kk] = rows;
            let (tokens, channels) = (chunk.tokens.clone(), channels.as_mut().and_then(Iterator::next));
            tasks.push(KeyTask { at, tokens, q, k, q_inverse_norms, k_inverse_norms, qk, kk, channels });
        }
    }
    tasks.into_par_iter().for_each(|task| task.run(problem));

    let mut tasks = Vec::new();
    for value in &mut heads.values {
        let Some(segment) = step.segment(value.sequence) else { continue };
        let at = HeadAt { sequence: value.sequence, head: value.head };
        let inverse = (&mut *value.inverse, problem.sizes.of_delta(CHUNK));
        let rows = [(&mut *value.decay, 1), (&mut *value.beta, 1), inverse];
        for (chunk, [decay, beta, inverse]) in segment.chunks.iter().zip(by_chunk(rows, segment)) {
            let kk = &heads.keys[value.key].kk[problem.sizes.of_delta(segment.rows(chunk).start * CHUNK)..];
            tasks.push(ValueTask { at, tokens: chunk.tokens.clone(), kk, decay, beta, inverse });
        }
    }
    tasks.into_par_iter().for_each(|task| task.run(problem));
}

/// The length of the transposed keys.
pub(super) fn scratch_lengths(sizes: &Sizes) -> [usize; 1] {
    [sizes.key_dim * CHUNK]
}

impl KeyTask<'_> {
    fn run<T: Float>(self, problem: &Problem<'_, T>) {
        let Self { at, tokens, q, k, q_inverse_norms, k_inverse_norms, qk, kk, channels } = self;
        let (len, dim) = (tokens.len(), problem.sizes.key_dim);
        problem.q.gather_f32(at, &tokens, q);
        problem.k.gather_f32(at, &tokens, k);
        let is_delta = problem.sizes.rule.is_delta();
        if is_delta {
            normalize(q, dim, problem.query_scale(), q_inverse_norms);
            normalize(k, dim, 1.0, k_inverse_norms);
        }
        if let Some(mut channels) = channels {
            problem.g.gather_f32(at, &tokens, channels.decay);
            decay_rows(q, k, &mut channels, dim);
            with_scratch([dim], |[term]| {
                pair_products(q, k, channels.decay, qk, kk, &mut term[..dim]);
            });
            return;
        }
        with_scratch(scratch_lengths(&problem.sizes), |[transposed]| {
            transpose_rows(k, dim, transposed, CHUNK, [len, dim]);
            let columns = Mat::new(transposed, dim, len, CHUNK);
            for (rows, products) in [(&*q, qk), (&*k, kk)].into_iter().take(1 + usize::from(is_delta)) {
                let products = MatMut::new(products, len, len, CHUNK);
                multiply_f32(products, Store::Overwrite, 1.0, Mat::new(rows, len, dim, dim), columns);
            }
        });
    }
}

impl ValueTask<'_> {
    fn run<T: Float>(self, problem: &Problem<'_, T>) {
        let Self { at, tokens, kk, decay, beta, inverse } = self;
        match problem.sizes.rule.has_channel_decays() {
            true => decay.fill(0.0),
            false => _ = problem.g.gather_f32(at, &tokens, decay),
        }
        problem.beta.gather_f32(at, &tokens, beta);
        let mut sum = 0.0;
        for decay in decay.iter_mut() {
            sum += *decay;
            *decay = sum;
        }
        if problem.sizes.rule.is_delta() {
            invert(kk, decay, beta, inverse);
        }
    }
}

simd_kernel! {
    /// Divides each row by its norm, times `scale`.
    fn normalize<S>(rows: &mut [f32], dim: usize, scale: f32, inverse_norms: &mut [f32]) {
        for (row, inverse_norm) in rows.chunks_exact_mut(dim).zip(inverse_norms) {
            let inverse = 1.0 / (simd::dot::<S>(row, row) + NORM_EPS as f32).sqrt();
            *inverse_norm = inverse;
            for x in row.iter_mut() {
                *x *= inverse * scale;
            }
        }
    }
}

simd_kernel! {
    /// Writes (I + L)⁻¹, row by row: `row i = eᵢ − Σ Lᵢⱼ · row j`.
    fn invert<S>(kk: &[f32], decay: &[f32], beta: &[f32], inverse: &mut [f32]) {
        for i in 0..decay.len() {
            let mut factors = [0.0; CHUNK];
            let products = factors[..i].iter_mut().zip(&kk[i * CHUNK..][..i]);
            for ((factor, product), before) in products.zip(decay) {
                *factor = beta[i] * product * simd::exp::<S>(decay[i] - before);
            }
            let mut sums = [0.0; CHUNK];
            for (factor, row) in factors.iter().zip(&inverse.as_chunks::<CHUNK>().0[..i]) {
                for (sum, element) in sums.iter_mut().zip(row) {
                    *sum = S::mul_add(-*factor, *element, *sum);
                }
            }
            sums[i] = 1.0;
            inverse[i * CHUNK..][..CHUNK].copy_from_slice(&sums);
        }
    }
}
