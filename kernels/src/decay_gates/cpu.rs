//! Decay and rate on slices, in f64: there are few heads per token.

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
}

impl<T: Float> Inputs<'_, T> {
    /// The projections of a block of tokens.
    fn block(&self, range: &Range<usize>) -> (Vec<f32>, Option<Vec<f32>>) {
        (widen(&self.a[range.clone()]), self.b.map(|b| widen(&b[range.clone()])))
    }

    /// The time step of a head before softplus, and after it, within the limits.
    fn times(&self, a: f32, head: usize) -> (f64, f64) {
        let time = f64::from(a) + f64::from(self.dt_bias[head]);
        (time, softplus(time).clamp(self.limits[0], self.limits[1]))
    }
}

pub(super) fn forward<T: Float>(inputs: &Inputs<'_, T>, [g, beta]: [&mut [f32]; 2]) {
    let heads = inputs.a_log.len();
    let size = BLOCK * heads;
    let blocks = (g.par_chunks_mut(size), beta.par_chunks_mut(size)).into_par_iter();
    blocks.enumerate().for_each(|(block, (g, beta))| {
        let (a, b) = inputs.block(&(block * size..block * size + g.len()));
        for (index, (g, beta)) in g.iter_mut().zip(beta).enumerate() {
            let (_, step) = inputs.times(a[index], index % heads);
            *g = (-rate(inputs.a_log[index % heads]) * step) as f32;
            *beta = b.as_ref().map_or(step, |b| sigmoid(f64::from(b[index]))) as f32;
        }
    });
}

/// Writes da, and db if there is one. Returns for each block of tokens the sums of `da_log` and of `ddt_bias`.
pub(super) fn backward<T: Float>(
    inputs: &Inputs<'_, T>,
    [dg, dbeta]: [&[f32]; 2],
    da: &mut [T],
    db: Option<&mut [T]>,
) -> Vec<f64> {
    let (heads, len) = (inputs.a_log.len(), inputs.a.len());
    let size = BLOCK * heads;
    let mut partials = vec![0.0; len.div_ceil(size) * 2 * heads];
    let db = db.unwrap_or_default();
    let dbs: Vec<&mut [T]> = match db.is_empty() {
        true => (0..len.div_ceil(size)).map(|_| Default::default()).collect(),
        false => db.chunks_mut(size).collect(),
    };
    let blocks = (da.par_chunks_mut(size), dbs, partials.par_chunks_mut((2 * heads).max(1))).into_par_iter();
    blocks.enumerate().for_each(|(block, (da, db, partial))| {
        let (sum_a_log, sum_dt_bias) = partial.split_at_mut(heads);
        let range = block * size..block * size + da.len();
        let (a, b) = inputs.block(&range);
        let (dg, dbeta) = (&dg[range.clone()], &dbeta[range]);
        let mut gradients = [vec![0.0; da.len()], vec![0.0; db.len()]];
        for (index, a) in a.iter().enumerate() {
            let head = index % heads;
            let (time, step) = inputs.times(*a, head);
            let (of_decay, dbeta) =
                (f64::from(dg[index]) * -rate(inputs.a_log[head]), f64::from(dbeta[index]));
            let of_step = match &b {
                None => of_decay + dbeta,
                Some(b) => {
                    let beta = sigmoid(f64::from(b[index]));
                    if let Some(db) = gradients[1].get_mut(index) {
                        *db = (dbeta * beta * (1.0 - beta)) as f32;
                    }
                    of_decay
                }
            };
            // As PyTorch's clamp: no gradient outside the limits.
            let is_clamped = step != softplus(time);
            let of_time = if is_clamped { 0.0 } else { of_step * sigmoid(time) };
            sum_a_log[head] += of_decay * step;
            sum_dt_bias[head] += of_time;
            gradients[0][index] = of_time as f32;
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

fn widen<T: Float>(elements: &[T]) -> Vec<f32> {
    let mut wide = vec![0.0; elements.len()];
    convert(elements, &mut wide);
    wide
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
