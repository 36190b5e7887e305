//! The elementwise work between the matmuls: one pass over a rectangle of scores, row by row.
//!
//! Rows of scores are padded to whole vectors, and masked keys are set to -inf first, so that the loops have
//! neither masks nor remainders.

use super::exp::exp;
use super::tiles::ROW_STRIDE;
use crate::attention::VisibleRanges;
use crate::attention::blocks::{Rectangle, intersect, within};
use crate::cast::Float;
use crate::matrix::MatMut;
use crate::simd::{Isa, LANES, Lanes, dot, max_lanes, max_of_lanes, simd_kernel};
use crate::softcap::{slope, softcap};
use std::ops::Range;

/// Partial sums of exponentials per query: one per lane. They are added up after the last key.
pub(super) const SUMS: usize = LANES / 2;

/// The online softmax of a block of queries.
pub(super) struct Running<'a> {
    /// Maximum score so far, per query.
    pub(super) max: &'a mut [f32],
    /// Partial sums of `exp(score - max)` so far, [`SUMS`] per query; a key's lane selects the partial sum.
    pub(super) sums: &'a mut [[f32; SUMS]],
    /// Sum of `exp(score - max) * v` so far, `[queries, head_dim]`.
    pub(super) output: &'a mut [f32],
    /// Columns of `output`.
    pub(super) head_dim: usize,
    /// The block's first query.
    pub(super) first_query: usize,
}

impl<'a> Running<'a> {
    /// The state before the first key, in buffers of at least these queries.
    pub(super) fn new(
        queries: &Range<usize>,
        head_dim: usize,
        max: &'a mut [f32],
        sums: &'a mut [f32],
        output: &'a mut [f32],
    ) -> Self {
        let rows = queries.len();
        let (max, sums) = (&mut max[..rows], &mut sums.as_chunks_mut().0[..rows]);
        let output = &mut output[..rows * head_dim];
        max.fill(f32::NEG_INFINITY);
        sums.fill([0.0; SUMS]);
        output.fill(0.0);
        Self { max, sums, output, head_dim, first_query: queries.start }
    }

    /// Divides by the denominators, and writes the output and their logarithms; a query without visible keys gets 0 and
    /// -inf.
    pub(super) fn finish<E: Float>(self, mut o: MatMut<'_, E>, lse: &mut [f32]) {
        let rows = self.output.chunks_mut(self.head_dim);
        let states = self.max.iter().zip(self.sums.iter());
        for ((lse, output), (&max, sums)) in lse.iter_mut().zip(rows).zip(states) {
            let sum: f32 = sums.iter().sum();
            let inverse = if max == f32::NEG_INFINITY { 0.0 } else { 1.0 / sum };
            *lse = max + sum.ln();
            output.iter_mut().for_each(|output| *output *= inverse);
        }
        o.round_from(self.output);
    }
}

simd_kernel! {
    /// Replaces a rectangle's scores by their soft caps.
    ///
    /// # Shapes
    /// `scores` has a row of [`ROW_STRIDE`] per query of the rectangle.
    pub(super) fn cap_scores<S>(rectangle: &Rectangle, cap: f32, scores: &mut [f32]) {
        for row in scores.chunks_mut(ROW_STRIDE).take(rectangle.queries.len()) {
            for score in &mut row[..rectangle.keys.len()] {
                *score = softcap::<S>(*score, cap);
            }
        }
    }
}

simd_kernel! {
    /// Replaces a rectangle's scores by `exp(score - max)`, where `max` includes them, and rescales earlier
    /// sums to that `max` (online softmax).
    ///
    /// # Shapes
    /// `scores` has a row of [`ROW_STRIDE`] per query of the rectangle.
    pub(super) fn online_softmax<S>(
        rectangle: &Rectangle,
        visible: &VisibleRanges,
        scores: &mut [f32],
        running: &mut Running<'_>,
    ) {
        // All rows' maxima first: the exponentials of a row depend on its maximum, which is a chain of
        // comparisons.
        let width = rectangle.keys.len().next_multiple_of(LANES);
        for (query, row) in rectangle.queries.clone().zip(scores.chunks_mut(ROW_STRIDE)) {
            let row = &mut row[..width];
            hide(row, &seen_keys(rectangle, visible, query));
            let index = query - running.first_query;
            // Rare after the first keys, so checking lane maxima is enough; the row's exact maximum is not
            // needed.
            if any_above(&largest(row), running.max[index]) {
                raise_max(running, index, row);
            }
        }
        for (query, row) in rectangle.queries.clone().zip(scores.chunks_mut(ROW_STRIDE)) {
            let row = &mut row[..width];
            let index = query - running.first_query;
            if seen_keys(rectangle, visible, query).is_empty() {
                row.fill(0.0);
            } else {
                add_powers::<S>(row, running.max[index], &mut running.sums[index]);
            }
        }
    }
}

simd_kernel! {
    /// Rescales a query's sums to the largest element of the row.
    fn raise_max<S>(running: &mut Running<'_>, index: usize, row: &[f32]) {
        let max = max_of_lanes(largest(row));
        let factor = exp::<S>(running.max[index] - max);
        running.max[index] = max;
        for sum in &mut running.sums[index] {
            *sum *= factor;
        }
        for element in &mut running.output[index * running.head_dim..][..running.head_dim] {
            *element *= factor;
        }
    }
}

/// Per-query inputs of the softmax's backward; the slices begin with the rectangle's first query.
pub(super) struct RowTerms<'a> {
    /// Log-denominators.
    pub(super) lse: &'a [f32],
    /// `rowsum(o * dout)`.
    pub(super) delta: &'a [f32],
    /// The soft cap that the scores have.
    pub(super) softcap: Option<f32>,
}

simd_kernel! {
    /// Turns scores into probabilities `p = exp(score - lse)`, and the gradients `dp` of these into those of
    /// the scores, `p * (dp - delta)`, before their soft cap.
    ///
    /// # Shapes
    /// `scores` and `gradients` have a row of [`ROW_STRIDE`] per query of the rectangle.
    pub(super) fn softmax_backward<S>(
        rectangle: &Rectangle,
        visible: &VisibleRanges,
        terms: &RowTerms<'_>,
        scores: &mut [f32],
        gradients: &mut [f32],
    ) {
        let rows = scores.chunks_mut(ROW_STRIDE).zip(gradients.chunks_mut(ROW_STRIDE));
        let softcap = terms.softcap;
        let terms = terms.lse.iter().zip(terms.delta);
        let width = rectangle.keys.len().next_multiple_of(LANES);
        for ((query, (scores, gradients)), (&lse, &delta)) in rectangle.queries.clone().zip(rows).zip(terms) {
            let (scores, gradients) = (&mut scores[..width], &mut gradients[..width]);
            let seen = seen_keys(rectangle, visible, query);
            if seen.is_empty() {
                scores.fill(0.0);
                gradients.fill(0.0);
                continue;
            }
            hide(scores, &seen);
            if let Some(cap) = softcap {
                for (score, gradient) in scores.iter_mut().zip(gradients.iter_mut()) {
                    let (p, slope) = (exp::<S>(*score - lse), slope(*score, cap));
                    *score = p;
                    *gradient = p * (*gradient - delta) * slope;
                }
                continue;
            }
            for (score, gradient) in scores.iter_mut().zip(gradients.iter_mut()) {
                let p = exp::<S>(*score - lse);
                *score = p;
                *gradient = p * (*gradient - delta);
            }
        }
    }
}

/// The visible keys of the rectangle for a query, relative to its first key.
#[inline(always)]
fn seen_keys(rectangle: &Rectangle, visible: &VisibleRanges, query: usize) -> Range<usize> {
    within(&intersect(&visible.of(query), &rectangle.keys), &rectangle.keys)
}

/// Sets everything except the visible part to -inf.
#[inline(always)]
fn hide(row: &mut [f32], seen: &Range<usize>) {
    row[..seen.start].fill(f32::NEG_INFINITY);
    row[seen.end..].fill(f32::NEG_INFINITY);
}

/// The maxima of every [`LANES`]th element of the row.
#[inline(always)]
fn largest(row: &[f32]) -> Lanes {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in row.as_chunks::<LANES>().0 {
        lanes = max_lanes(&lanes, chunk);
    }
    lanes
}

/// Checks all lanes without branches, as vectors do.
#[inline(always)]
fn any_above(lanes: &Lanes, bound: f32) -> bool {
    let mut any = false;
    for lane in lanes {
        any |= *lane > bound;
    }
    any
}

/// Replaces the row by `exp(element - max)` and adds every [`SUMS`]th element to its partial sum.
#[inline(always)]
fn add_powers<S: Isa>(row: &mut [f32], max: f32, sums: &mut [f32; SUMS]) {
    let mut lanes = [0f32; LANES];
    for chunk in row.as_chunks_mut::<LANES>().0 {
        for (lane, element) in lanes.iter_mut().zip(chunk) {
            *element = exp::<S>(*element - max);
            *lane += *element;
        }
    }
    for (index, sum) in sums.iter_mut().enumerate() {
        *sum += lanes[index] + lanes[index + SUMS];
    }
}

simd_kernel! {
    /// Writes the row sums of `a * b`, `sums[i] = sum_j a[i][j] b[i][j]`, for rows `stride` apart.
    pub(super) fn row_dots<S>(a: &[f32], b: &[f32], stride: usize, head_dim: usize, sums: &mut [f32]) {
        for ((sum, a), b) in sums.iter_mut().zip(a.chunks(stride)).zip(b.chunks(stride)) {
            *sum = dot::<S>(&a[..head_dim], &b[..head_dim]);
        }
    }
}
