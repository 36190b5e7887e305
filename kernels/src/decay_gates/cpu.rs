//! Decay and rate on slices, in f64.

use super::Dims;
use crate::cast::{Float, convert};
use rayon::prelude::*;
use std::ops::Range;

/// Tokens per block with a partial sum. A constant, so that the order of the sums does not depend on the threads.
const BLOCK: usize = 512;

/// The operands of both directions.
pub(super) struct Inputs<'a, T> {
    pub(super) a: &'a [T],
    /// The projection for the rate; without it the rate is the time step.
    pub(super) b: Option<&'a [T]>,
    pub(super) limits: [f64; 2],
    pub(super) a_log: &'a [f32],
    pub(super) dt_bias: &'a [f32],
    /// Decays of each head.
    pub(super) channels: usize,
}

impl<T: Float> Inputs<'_, T> {
    /// The decay per unit of time of each column.
    fn rates(&self) -> Vec<f64> {
        let of_head = |a_log: &f32| std::iter::repeat_n(f64::from(*a_log).exp(), self.channels);
        self.a_log.iter().flat_map(of_head).collect()
    }

    /// The time of a column before softplus.
    fn time(&self, a: f32, column: usize) -> f64 {
        f64::from(a) + f64::from(self.dt_bias[column])
    }

    /// The time step, within the limits.
    fn step(&self, time: f64) -> f64 {
        softplus(time).clamp(self.limits[0], self.limits[1])
    }
}

pub(super) fn forward<T: Float>(inputs: &Inputs<'_, T>, g: &mut [f32], beta: &mut [f32]) {
    let (heads, rates) = (inputs.a_log.len(), inputs.rates());
    let blocks = (g.par_chunks_mut(size(rates.len())), beta.par_chunks_mut(size(heads))).into_par_iter();
    blocks.enumerate().for_each(|(block, (g, beta))| {
        let tokens = block * BLOCK..block * BLOCK + beta.len() / heads;
        let (a, b) = (widen(inputs.a, &tokens, rates.len()), inputs.b.map(|b| widen(b, &tokens, heads)));
        for (index, g) in g.iter_mut().enumerate() {
            let column = index % rates.len();
            let step = inputs.step(inputs.time(a[index], column));
            *g = (-rates[column] * step) as f32;
            if b.is_none() {
                beta[index] = step as f32;
            }
        }
        for (beta, b) in beta.iter_mut().zip(b.unwrap_or_default()) {
            *beta = sigmoid(f64::from(b)) as f32;
        }
    });
}

/// Writes da, and db if there is one. Returns for each block of tokens the sums of `da_log` and of `ddt_bias`.
pub(super) fn backward<T: Float>(
    inputs: &Inputs<'_, T>,
    dg: &[f32],
    dbeta: &[f32],
    da: &mut [T],
    db: Option<&mut [T]>,
) -> Vec<f64> {
    let (heads, rates) = (inputs.a_log.len(), inputs.rates());
    let size_of_block = size(rates.len());
    let num_blocks = da.len().div_ceil(size_of_block);
    let mut partials = vec![0.0; num_blocks * (heads + rates.len())];
    let dbs: Vec<&mut [T]> = match db {
        None => (0..num_blocks).map(|_| Default::default()).collect(),
        Some(db) => db.chunks_mut(size(heads)).collect(),
    };
    let partial_sums = partials.par_chunks_mut((heads + rates.len()).max(1));
    let blocks = (da.par_chunks_mut(size_of_block), dbs, partial_sums).into_par_iter();
    blocks.enumerate().for_each(|(block, (da, db, partial))| {
        let (sum_a_log, sum_dt_bias) = partial.split_at_mut(heads);
        let tokens = block * BLOCK..block * BLOCK + da.len() / rates.len();
        let (a, b) = (widen(inputs.a, &tokens, rates.len()), inputs.b.map(|b| widen(b, &tokens, heads)));
        let (dg, dbeta) = (&dg[block * size_of_block..], &dbeta[tokens.start * heads..]);
        let mut gradients = vec![0.0; da.len()];
        for (index, a) in a.iter().enumerate() {
            let column = index % rates.len();
            let time = inputs.time(*a, column);
            let step = inputs.step(time);
            let of_decay = f64::from(dg[index]) * -rates[column];
            let of_step = if b.is_some() { of_decay } else { of_decay + f64::from(dbeta[index]) };
            // As PyTorch's clamp: no gradient outside the limits.
            let is_clamped = step != softplus(time);
            let of_time = if is_clamped { 0.0 } else { of_step * sigmoid(time) };
            sum_a_log[column / inputs.channels] += of_decay * step;
            sum_dt_bias[column] += of_time;
            gradients[index] = of_time as f32;
        }
        convert(&gradients, da);
        let of_rate = |(b, dbeta): (&f32, &f32)| {
            let beta = sigmoid(f64::from(*b));
            (f64::from(*dbeta) * beta * (1.0 - beta)) as f32
        };
        let db_wide: Vec<f32> = b.iter().flatten().zip(dbeta).map(of_rate).take(db.len()).collect();
        convert(&db_wide, db);
    });
    partials
}

/// The sums of `da_log` and of `ddt_bias` over the blocks, in order.
pub(super) fn sum_partials(partials: &[f64], dims: Dims) -> [Vec<f64>; 2] {
    let (heads, columns) = (dims.heads, dims.columns());
    let mut sums = [vec![0.0; heads], vec![0.0; columns]];
    for partial in partials.chunks_exact((heads + columns).max(1)) {
        let (of_a_log, of_dt_bias) = partial.split_at(heads);
        for (sums, partial) in sums.iter_mut().zip([of_a_log, of_dt_bias]) {
            sums.iter_mut().zip(partial).for_each(|(sum, value)| *sum += value);
        }
    }
    sums
}

/// Bytes of the partial sums and their totals.
pub(super) fn partials_bytes(dims: Dims) -> usize {
    (dims.tokens.div_ceil(BLOCK) + 1) * (dims.heads + dims.columns()) * size_of::<f64>()
}

/// The elements of a block of tokens with so many columns; an empty shard has none.
fn size(columns: usize) -> usize {
    (BLOCK * columns).max(1)
}

/// Some tokens of a projection `[n, width]`.
fn widen<T: Float>(projection: &[T], tokens: &Range<usize>, width: usize) -> Vec<f32> {
    let elements = &projection[tokens.start * width..tokens.end * width];
    let mut wide = vec![0.0; elements.len()];
    convert(elements, &mut wide);
    wide
}

/// log(1 + eˣ)
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
