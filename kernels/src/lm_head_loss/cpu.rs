//! Tiled linear + cross-entropy on slices, with checked labels. Logits and their gradients are always f32.

use super::{ELSEWHERE, IGNORED, Sizes, all_ignored};
use crate::OpError;
use crate::gemm::bf16::Stored;
use crate::gemm::dispatch::multiply;
use crate::gemm::operand::MatmulOperand;
use crate::parallel::rows_per_block;
use crate::simd::{Isa, LANES, Lanes, exp, max_lanes, max_of_lanes, padded, simd_kernel, sum_of_lanes};
use crate::softcap::{slope, softcap};
use rayon::prelude::*;
use std::ops::Range;

/// The parameters of the projection.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a, T> {
    pub(super) weight: &'a [T],
    pub(super) bias: Option<&'a [f32]>,
}

/// `logits` has room for a tile. Calls `each` with index, logsumexp and logit of the label of every token that has one, in order; the
/// logit is −∞ if the label is elsewhere.
pub(super) fn forward<T: Stored>(
    sizes: Sizes,
    x: &[T],
    weights: Weights<'_, T>,
    labels: &[i64],
    lse: &mut [f32],
    logits: &mut [f32],
    mut each: impl FnMut(usize, f32, f32),
) -> Result<(), OpError> {
    let Sizes { dim, vocab_size, .. } = sizes;
    for tokens in sizes.tiles() {
        let (labels, lse) = (&labels[tokens.clone()], &mut lse[tokens.clone()]);
        if all_ignored(labels) {
            lse.fill(0.0);
            continue;
        }
        let logits = &mut logits[..tokens.len() * vocab_size];
        logits_of_tile(sizes, &x[tokens.start * dim..tokens.end * dim], weights, logits)?;

        let rows = rows_per_block(labels.len(), vocab_size);
        (logits.par_chunks(rows * vocab_size), labels.par_chunks(rows), lse.par_chunks_mut(rows))
            .into_par_iter()
            .for_each(|(logits, labels, lse)| lse_rows(logits, vocab_size, labels, lse));

        let rows = logits.chunks_exact(vocab_size).zip(labels).zip(lse).zip(tokens);
        for (((logits, label), lse), token) in rows.filter(|(((_, label), _), _)| **label != IGNORED) {
            let logit = usize::try_from(*label).map_or(f32::NEG_INFINITY, |label| logits[label]);
            each(token, *lse, logit);
        }
    }
    Ok(())
}

/// Inputs of the backward pass.
#[derive(Clone, Copy)]
pub(super) struct BackwardInputs<'a, T> {
    pub(super) x: &'a [T],
    pub(super) weights: Weights<'a, T>,
    pub(super) labels: &'a [i64],
    pub(super) lse: &'a [f32],
    pub(super) scale: f32,
}

/// `logits` has room for a tile. Adds to the gradients of weight and bias.
pub(super) fn backward<T: Stored>(
    sizes: Sizes,
    inputs: BackwardInputs<'_, T>,
    dx: &mut [T],
    mut dweight: Option<&mut [f32]>,
    mut dbias: Option<&mut [f64]>,
    logits: &mut [f32],
) -> Result<(), OpError> {
    let Sizes { dim, vocab_size, .. } = sizes;
    let BackwardInputs { x, weights, labels, lse, scale } = inputs;
    for tokens in sizes.tiles() {
        let rows_of_x = tokens.start * dim..tokens.end * dim;
        let (labels, lse) = (&labels[tokens.clone()], &lse[tokens.clone()]);
        let dx = &mut dx[rows_of_x.clone()];
        if all_ignored(labels) {
            dx.fill(T::zero());
            continue;
        }
        let n = tokens.len();
        let tile = &mut logits[..n * vocab_size];
        let x = &x[rows_of_x];
        logits_of_tile(sizes, x, weights, tile)?;

        let rows = rows_per_block(n, vocab_size);
        (tile.par_chunks_mut(rows * vocab_size), labels.par_chunks(rows), lse.par_chunks(rows))
            .into_par_iter()
            .for_each(|(tile, labels, lse)| gradient_rows(tile, labels, lse, scale, sizes));

        multiply(
            MatmulOperand::contiguous(tile, n, vocab_size)?,
            MatmulOperand::interleaved(weights.weight, dim, vocab_size)?,
            dx,
            false,
        )?;
        if let Some(dweight) = dweight.as_deref_mut() {
            multiply(
                MatmulOperand::interleaved(tile, vocab_size, n)?,
                MatmulOperand::interleaved(x, dim, n)?,
                dweight,
                true,
            )?;
        }
        dbias.as_deref_mut().into_iter().for_each(|dbias| add_rows(tile, dbias));
    }
    Ok(())
}

/// Adds the rows of a tile to `sums`, in order.
fn add_rows(tile: &[f32], sums: &mut [f64]) {
    let vocab_size = sums.len();
    let columns = rows_per_block(vocab_size, tile.len() / vocab_size);
    sums.par_chunks_mut(columns).enumerate().for_each(|(block, sums)| {
        for row in tile.chunks_exact(vocab_size) {
            let row = &row[block * columns..];
            sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
        }
    });
}

/// The logits of a tile's tokens `x`, with their soft cap.
fn logits_of_tile<T: Stored>(
    Sizes { dim, vocab_size, softcap, .. }: Sizes,
    x: &[T],
    Weights { weight, bias }: Weights<'_, T>,
    logits: &mut [f32],
) -> Result<(), OpError> {
    if let Some(bias) = bias {
        logits.par_chunks_mut(vocab_size).for_each(|row| row.copy_from_slice(bias));
    }
    let x = MatmulOperand::contiguous(x, x.len().checked_div(dim).unwrap_or(0), dim)?;
    multiply(x, MatmulOperand::contiguous(weight, vocab_size, dim)?, logits, bias.is_some())?;
    if let Some(cap) = softcap {
        logits.par_chunks_mut(rows_per_block(logits.len(), 1)).for_each(|logits| cap_logits(logits, cap));
    }
    Ok(())
}

simd_kernel! {
    fn cap_logits<S>(logits: &mut [f32], cap: f32) {
        for logit in logits.iter_mut() {
            *logit = softcap::<S>(*logit, cap);
        }
    }
}

simd_kernel! {
    fn lse_rows<S>(logits: &[f32], vocab_size: usize, labels: &[i64], lse: &mut [f32]) {
        for ((logits, label), lse) in logits.chunks_exact(vocab_size).zip(labels).zip(lse) {
            *lse = if *label == IGNORED { 0.0 } else { log_sum_exp::<S>(logits) };
        }
    }
}

#[inline(always)]
fn log_sum_exp<S: Isa>(logits: &[f32]) -> f32 {
    /// Number of elements that are summed in f32 before they are added to the f64 total, which keeps the
    /// error of a large vocabulary small.
    const SEGMENT: usize = 4096;

    let max = max_of(logits);
    let mut total = 0.0f64;
    for segment in logits.chunks(SEGMENT) {
        let (chunks, tail) = segment.as_chunks::<LANES>();
        let mut sums = [0.0; LANES];
        for chunk in chunks {
            sums = add_exp::<S>(sums, chunk, max);
        }
        if !tail.is_empty() {
            sums = add_exp::<S>(sums, &padded(tail, f32::NEG_INFINITY), max);
        }
        total += f64::from(sum_of_lanes(sums));
    }
    (f64::from(max) + total.ln()) as f32
}

#[inline(always)]
fn add_exp<S: Isa>(mut sums: Lanes, logits: &Lanes, max: f32) -> Lanes {
    for lane in 0..LANES {
        sums[lane] += exp::<S>(logits[lane] - max);
    }
    sums
}

/// The largest element. NaNs are ignored here and show in the sum.
#[inline(always)]
fn max_of(values: &[f32]) -> f32 {
    let (chunks, tail) = values.as_chunks::<LANES>();
    let mut max = padded(tail, f32::NEG_INFINITY);
    for chunk in chunks {
        max = max_lanes(&max, chunk);
    }
    max_of_lanes(max)
}

simd_kernel! {
    /// Turns logits into scale · (softmax − one-hot of the label), times the derivative of a soft cap, and rows of ignored
    /// tokens into zeros.
    fn gradient_rows<S>(tile: &mut [f32], labels: &[i64], lse: &[f32], scale: f32, sizes: Sizes) {
        for ((row, label), lse) in tile.chunks_exact_mut(sizes.vocab_size).zip(labels).zip(lse) {
            if *label == IGNORED {
                row.fill(0.0);
                continue;
            }
            // The column of the label, unless it is in another slice.
            let label = (*label != ELSEWHERE).then_some(*label as usize);
            if let Some(cap) = sizes.softcap {
                let of_label = label.map(|label| scale * slope(row[label], cap));
                for value in row.iter_mut() {
                    *value = exp::<S>(*value - lse) * scale * slope(*value, cap);
                }
                label.into_iter().zip(of_label).for_each(|(label, of_label)| row[label] -= of_label);
                continue;
            }
            for value in row.iter_mut() {
                *value = exp::<S>(*value - lse) * scale;
            }
            label.into_iter().for_each(|label| row[label] -= scale);
        }
    }
}

/// The losses of the tokens `own`, summed, from the statistics of all slices, `[slices, 2, n]`, and the logsumexp of all tokens.
pub(super) fn combine(statistics: &[f32], lse: &mut [f32], own: Range<usize>) -> f64 {
    let n = lse.len();
    let mut sum = 0.0;
    for (token, lse) in lse.iter_mut().enumerate() {
        let of_slices = |row: usize| statistics.iter().skip(row * n + token).step_by(2 * n).copied();
        let max = of_slices(0).fold(f32::NEG_INFINITY, f32::max);
        let shift = if max == f32::NEG_INFINITY { 0.0 } else { f64::from(max) };
        let total: f64 = of_slices(0).map(|lse| (f64::from(lse) - shift).exp()).sum();
        *lse = (shift + total.ln()) as f32;
        if own.contains(&token) {
            sum += f64::from(*lse) - f64::from(of_slices(1).fold(f32::NEG_INFINITY, f32::max));
        }
    }
    sum
}
