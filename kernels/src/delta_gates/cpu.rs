//! Decay and rate on slices, in f64: there are few heads per token.

use crate::cast::{Float, convert};
use rayon::prelude::*;

/// Tokens per block with a partial sum. A constant, so that the order of the sums does not depend on the threads.
const BLOCK: usize = 512;

pub(super) fn forward<T: Float>(
    [a, b]: [&[T]; 2],
    [a_log, dt_bias]: [&[f32]; 2],
    [g, beta]: [&mut [f32]; 2],
) {
    let size = BLOCK * a_log.len();
    let blocks = (a.par_chunks(size), b.par_chunks(size), g.par_chunks_mut(size), beta.par_chunks_mut(size));
    blocks.into_par_iter().for_each(|(a, b, g, beta)| {
        let heads = a_log.iter().zip(dt_bias).cycle();
        let (a, b) = (widen(a), widen(b));
        for ((((a, b), (a_log, dt_bias)), g), beta) in a.iter().zip(&b).zip(heads).zip(g).zip(beta) {
            *g = (-rate(*a_log) * softplus(f64::from(*a) + f64::from(*dt_bias))) as f32;
            *beta = sigmoid(f64::from(*b)) as f32;
        }
    });
}

/// Writes da and db, and returns for each block of tokens the sums of `da_log` and of `ddt_bias`.
pub(super) fn backward<T: Float>(
    [a, b]: [&[T]; 2],
    [a_log, dt_bias]: [&[f32]; 2],
    [dg, dbeta]: [&[f32]; 2],
    [da, db]: [&mut [T]; 2],
) -> Vec<f64> {
    let heads = a_log.len();
    let size = BLOCK * heads;
    let mut partials = vec![0.0; a.len().div_ceil(size) * 2 * heads];
    let inputs = (a.par_chunks(size), b.par_chunks(size), dg.par_chunks(size), dbeta.par_chunks(size));
    let outputs =
        (da.par_chunks_mut(size), db.par_chunks_mut(size), partials.par_chunks_mut((2 * heads).max(1)));
    let blocks = (inputs.0, inputs.1, inputs.2, inputs.3, outputs.0, outputs.1, outputs.2).into_par_iter();
    blocks.for_each(|(a, b, dg, dbeta, da, db, partial)| {
        let (sum_a_log, sum_dt_bias) = partial.split_at_mut(heads);
        let (a, b) = (widen(a), widen(b));
        let mut gradients = [vec![0.0; a.len()], vec![0.0; a.len()]];
        for index in 0..a.len() {
            let head = index % heads;
            let time = f64::from(a[index]) + f64::from(dt_bias[head]);
            let dg = f64::from(dg[index]) * -rate(a_log[head]);
            let da = dg * sigmoid(time);
            sum_a_log[head] += dg * softplus(time);
            sum_dt_bias[head] += da;
            let beta = sigmoid(f64::from(b[index]));
            gradients[0][index] = da as f32;
            gradients[1][index] = (f64::from(dbeta[index]) * beta * (1.0 - beta)) as f32;
        }
        convert(&gradients[0], da);
        convert(&gradients[1], db);
    });
    partials
}

/// The sums of `da_log` and of `ddt_bias` over the blocks, in order.
pub(super) fn sum_partials(partials: &[f64], heads: usize) -> [Vec<f64>; 2] {
    let mut sums = [vec![0.0; heads], vec![0.0; heads]];
    for partial in partials.chunks_exact(2 * heads) {
        for (sums, partial) in sums.iter_mut().zip(partial.chunks_exact(heads)) {
            sums.iter_mut().zip(partial).for_each(|(sum, value)| *sum += value);
        }
    }
    sums
}

/// Bytes of the partial sums and their totals.
pub(super) fn partials_bytes([tokens, heads]: [usize; 2]) -> usize {
    (tokens.div_ceil(BLOCK) + 1) * 2 * heads * size_of::<f64>()
}

fn rate(a_log: f32) -> f64 {
    f64::from(a_log).exp()
}

/// log(1 + eˣ)
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn widen<T: Float>(elements: &[T]) -> Vec<f32> {
    let mut wide = vec![0.0; elements.len()];
    convert(elements, &mut wide);
    wide
}
