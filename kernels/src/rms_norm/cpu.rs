//! RMS normalization on slices: each row is read twice, the second time from the cache.

use crate::arg_check::RowSizes;
use crate::cast::{Before, Pieces, rows_per_piece};
use crate::parallel::{MIN_BLOCK_ELEMS, rows_per_block};
use crate::simd::{self, LANES, simd_kernel};
use rayon::prelude::*;

/// The rows are divided into at most this many blocks, each with its own partial weight gradient.
const MAX_WEIGHT_BLOCKS: usize = 64;

/// A weight block has at least this many rows, so that summing the partials stays cheap.
const MIN_WEIGHT_BLOCK_ROWS: usize = 16;

/// The reciprocal roots by which a forward pass multiplies.
#[derive(Clone, Copy)]
pub(super) enum Roots {
    /// Those of the rows, without their means if `centered`, which it writes.
    Computed { eps: f64, centered: bool },
    /// Those that are there.
    Given,
}

/// Writes the reciprocal roots of whole rows of `width` elements with these sums of squares.
pub(super) fn roots(sums: &[f32], width: usize, eps: f64, rstd: &mut [f32]) {
    for (rstd, sum) in rstd.iter_mut().zip(sums) {
        *rstd = (1.0 / (f64::from(*sum) / width as f64 + eps).sqrt()) as f32;
    }
}

pub(super) fn forward<T: Pieces>(x: &[T], gain: &[f32], roots: Roots, y: &mut [T], rstd: &mut [f32]) {
    let d = gain.len();
    let (rows, piece) = (rows_per_block(rstd.len(), d), rows_per_piece(d));
    (x.par_chunks(rows * d), y.par_chunks_mut(rows * d), rstd.par_chunks_mut(rows))
        .into_par_iter()
        .for_each_init(Default::default, |[a, b]: &mut [Vec<f32>; 2], (x, y, rstd)| {
            let outputs = y.chunks_mut(piece * d).zip(rstd.chunks_mut(piece));
            for (x, (y, rstd)) in x.chunks(piece * d).zip(outputs) {
                let x = T::read(x, a);
                T::update(y, Before::Garbage, b, |y| match roots {
                    Roots::Computed { eps, centered: true } => forward_rows_centered(x, gain, eps, y, rstd),
                    Roots::Computed { eps, .. } => forward_rows(x, gain, eps, y, rstd),
                    Roots::Given => scale_rows(x, gain, rstd, y),
                });
            }
        });
}

simd_kernel! {
    fn forward_rows<S>(x: &[f32], gain: &[f32], eps: f64, y: &mut [f32], rstd: &mut [f32]) {
        let d = gain.len();
        for ((x, y), rstd) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(rstd) {
            let mean_square = f64::from(simd::dot::<S>(x, x)) / d as f64;
            let r = (1.0 / (mean_square + eps).sqrt()) as f32;
            *rstd = r;
            for ((y, x), w) in y.iter_mut().zip(x).zip(gain) {
                *y = w * (x * r);
            }
        }
    }
}

simd_kernel! {
    fn scale_rows<S>(x: &[f32], gain: &[f32], rstd: &[f32], y: &mut [f32]) {
        let d = gain.len();
        for ((x, y), r) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(rstd) {
            for ((y, x), w) in y.iter_mut().zip(x).zip(gain) {
                *y = w * (x * r);
            }
        }
    }
}

/// Writes `Σ a · b · gain` of every row, or `Σ a · b`.
pub(super) fn products<T: Pieces>(a: &[T], b: &[T], gain: Option<&[f32]>, d: usize, sums: &mut [f32]) {
    let (rows, piece) = (rows_per_block(sums.len(), d), rows_per_piece(d));
    (a.par_chunks(rows * d), b.par_chunks(rows * d), sums.par_chunks_mut(rows))
        .into_par_iter()
        .for_each_init(Default::default, |[wide_a, wide_b]: &mut [Vec<f32>; 2], (a, b, sums)| {
            let inputs = a.chunks(piece * d).zip(b.chunks(piece * d));
            for ((a, b), sums) in inputs.zip(sums.chunks_mut(piece)) {
                product_rows(T::read(a, wide_a), T::read(b, wide_b), gain, sums);
            }
        });
}

simd_kernel! {
    fn product_rows<S>(a: &[f32], b: &[f32], gain: Option<&[f32]>, sums: &mut [f32]) {
        let d = a.len() / sums.len();
        for ((a, b), sum) in a.chunks_exact(d).zip(b.chunks_exact(d)).zip(sums) {
            *sum = match gain {
                Some(gain) => simd::dot3::<S>(a, gain, b),
                None => simd::dot::<S>(a, b),
            };
        }
    }
}

simd_kernel! {
    fn forward_rows_centered<S>(x: &[f32], gain: &[f32], eps: f64, y: &mut [f32], rstd: &mut [f32]) {
        let d = gain.len();
        for ((x, y), rstd) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(rstd) {
            center(x, y);
            let mean_square = f64::from(simd::dot::<S>(y, y)) / d as f64;
            let r = (1.0 / (mean_square + eps).sqrt()) as f32;
            *rstd = r;
            for (y, w) in y.iter_mut().zip(gain) {
                *y = w * (*y * r);
            }
        }
    }
}

/// Writes the row without its mean.
#[inline(always)]
fn center(x: &[f32], centered: &mut [f32]) {
    let mean = mean(x);
    for (centered, x) in centered.iter_mut().zip(x) {
        *centered = x - mean;
    }
}

#[inline(always)]
fn mean(x: &[f32]) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut sums = [0.0f64; LANES];
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(*x);
        }
    }
    for (sum, x) in sums.iter_mut().zip(tail) {
        *sum += f64::from(*x);
    }
    (sums.iter().sum::<f64>() / x.len() as f64) as f32
}

/// Rows per block with a partial weight gradient. Independent of the number of threads, since it determines
/// the order of the sum over rows.
fn weight_block_rows(num_rows: usize) -> usize {
    num_rows.div_ceil(MAX_WEIGHT_BLOCKS).max(MIN_WEIGHT_BLOCK_ROWS)
}

/// Bytes of the partial weight gradients, plus their sum.
pub(super) fn backward_scratch_bytes(RowSizes { count, width }: RowSizes) -> usize {
    count.div_ceil(weight_block_rows(count)) * width * size_of::<f32>() + width * size_of::<f64>()
}

/// Inputs of the backward pass.
#[derive(Clone, Copy)]
pub(super) struct BackwardInputs<'a, T = f32> {
    pub(super) dy: &'a [T],
    pub(super) x: &'a [T],
    pub(super) gain: &'a [f32],
    pub(super) rstd: &'a [f32],
    pub(super) centered: bool,
    /// If the rows are parts of wider ones.
    pub(super) whole: Option<WholeSums<'a>>,
}

/// Sums of `dy · x · gain` over each whole row of `width` elements.
#[derive(Clone, Copy)]
pub(super) struct WholeSums<'a> {
    pub(super) sums: &'a [f32],
    pub(super) width: usize,
}

impl WholeSums<'_> {
    /// Those of `count` rows from `first` on.
    fn of_rows(self, first: usize, count: usize) -> Self {
        Self { sums: &self.sums[first..first + count], ..self }
    }
}

/// Writes dx and returns the partial sums of the weight gradient, for [`sum_partials`], computed in the same
/// pass.
pub(super) fn backward<T: Pieces>(
    inputs: BackwardInputs<'_, T>,
    dx: &mut [T],
    accumulate_dx: bool,
) -> Vec<f32> {
    let BackwardInputs { dy, x, gain, rstd, .. } = inputs;
    let d = gain.len();
    let rows = weight_block_rows(rstd.len());
    let mut partials = vec![0.0; rstd.len().div_ceil(rows) * d];

    let blocks = (
        dy.par_chunks(rows * d),
        x.par_chunks(rows * d),
        rstd.par_chunks(rows),
        dx.par_chunks_mut(rows * d),
        partials.par_chunks_mut(d),
    );
    let blocks = blocks.into_par_iter().enumerate().with_min_len(MIN_BLOCK_ELEMS.div_ceil(rows * d));
    blocks.for_each_init(
        Default::default,
        |buffers: &mut [Vec<f32>; 3], (index, (dy, x, rstd, dx, partial))| {
            let whole = inputs.whole.map(|whole| whole.of_rows(index * rows, rstd.len()));
            let inputs = BackwardInputs { dy, x, rstd, whole, ..inputs };
            backward_pieces(inputs, dx, accumulate_dx, partial, buffers);
        },
    );
    partials
}

fn backward_pieces<T: Pieces>(
    inputs: BackwardInputs<'_, T>,
    dx: &mut [T],
    accumulate_dx: bool,
    partial: &mut [f32],
    [a, b, c]: &mut [Vec<f32>; 3],
) {
    let BackwardInputs { dy, x, gain, rstd, centered, .. } = inputs;
    let (d, piece) = (gain.len(), rows_per_piece(gain.len()));
    let before = if accumulate_dx { Before::Values } else { Before::Garbage };
    let pieces = dy.chunks(piece * d).zip(x.chunks(piece * d)).zip(rstd.chunks(piece));
    for (index, (((dy, x), rstd), dx)) in pieces.zip(dx.chunks_mut(piece * d)).enumerate() {
        let whole = inputs.whole.map(|whole| whole.of_rows(index * piece, rstd.len()));
        let inputs = BackwardInputs { dy: T::read(dy, a), x: T::read(x, b), gain, rstd, centered, whole };
        T::update(dx, before, c, |dx| match (centered, accumulate_dx) {
            (true, _) => backward_rows_centered(inputs, dx, accumulate_dx, partial),
            (false, true) => backward_rows_accumulating(inputs, dx, partial),
            (false, false) => backward_rows(inputs, dx, partial),
        });
    }
}

simd_kernel! {
    fn backward_rows<S>(inputs: BackwardInputs<'_>, dx: &mut [f32], dweight: &mut [f32]) {
        backward_rows_with::<S, false>(inputs, dx, dweight);
    }
}

simd_kernel! {
    fn backward_rows_accumulating<S>(inputs: BackwardInputs<'_>, dx: &mut [f32], dweight: &mut [f32]) {
        backward_rows_with::<S, true>(inputs, dx, dweight);
    }
}

simd_kernel! {
    /// As the others for the centered row, whose gradient is then centered: the derivative of a projection is itself.
    fn backward_rows_centered<S>(
        inputs: BackwardInputs<'_>,
        dx: &mut [f32],
        accumulate: bool,
        dweight: &mut [f32],
    ) {
        let d = inputs.gain.len();
        let (mut x, mut gradient) = (vec![0.0; d], vec![0.0; d]);
        let rows = inputs.dy.chunks_exact(d).zip(inputs.x.chunks_exact(d)).zip(inputs.rstd.chunks_exact(1));
        for (((dy, row), rstd), dx) in rows.zip(dx.chunks_exact_mut(d)) {
            center(row, &mut x);
            let inputs = BackwardInputs { dy, x: &x, rstd, ..inputs };
            backward_rows_with::<S, false>(inputs, &mut gradient, dweight);
            let mean = mean(&gradient);
            for (dx, gradient) in dx.iter_mut().zip(&gradient) {
                *dx = if accumulate { *dx + (gradient - mean) } else { gradient - mean };
            }
        }
    }
}

/// With x̂ = x·rstd and g = dy·gain: dx = rstd·(g − x̂·mean(g·x̂)) and dweight += dy·x̂.
#[inline(always)]
fn backward_rows_with<S: simd::Isa, const ACCUMULATE: bool>(
    inputs: BackwardInputs<'_>,
    dx: &mut [f32],
    dweight: &mut [f32],
) {
    let gain = inputs.gain;
    let d = gain.len();
    let dweight = &mut dweight[..d];
    let rows = inputs.dy.chunks_exact(d).zip(inputs.x.chunks_exact(d)).zip(inputs.rstd);
    for (row, (((dy, x), &r), dx)) in rows.zip(dx.chunks_exact_mut(d)).enumerate() {
        let mean = match inputs.whole {
            Some(WholeSums { sums, width }) => sums[row] * r / width as f32,
            None => simd::dot3::<S>(dy, gain, x) * r / d as f32,
        };
        for i in 0..d {
            let x_hat = x[i] * r;
            let gradient = r * S::mul_add(x_hat, -mean, dy[i] * gain[i]);
            dx[i] = if ACCUMULATE { dx[i] + gradient } else { gradient };
            dweight[i] = S::mul_add(dy[i], x_hat, dweight[i]);
        }
    }
}

/// Σ partials of `d` elements, block by block in f64.
pub(super) fn sum_partials(partials: &[f32], d: usize) -> Vec<f64> {
    let mut sums = vec![0.0; d];
    for partial in partials.chunks_exact(d) {
        for (sum, value) in sums.iter_mut().zip(partial) {
            *sum += f64::from(*value);
        }
    }
    sums
}
