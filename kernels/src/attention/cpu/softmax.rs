//! The elementwise work between the matrix products: one pass over a rectangle of scores, row by row.
//!
//! Rows of scores are padded to whole vectors and what a query does not see is set to -inf first, so that the
//! loops have neither masks nor remainders.

use super::exp::exp;
use super::tiles::{KEY_BLOCK, Span};
use crate::attention::{VisibleRanges, blocks::intersect};
use crate::simd::{Isa, LANES, Lanes, dot, max_lanes, max_of_lanes, simd_kernel};
use std::ops::Range;

/// Distance between two rows of scores. Not a power of two, so that a column does not map to one cache set.
pub(super) const ROW_STRIDE: usize = KEY_BLOCK + LANES;

/// Sums of powers per query: those that a vector adds at once. They are added up when there are no more keys.
pub(super) const SUMS: usize = LANES / 2;

/// A query block's running softmax.
pub(super) struct Running<'a> {
    /// Largest score so far, per query.
    pub(super) max: &'a mut [f32],
    /// Sums of `exp(score - max)` so far, [`SUMS`] per query: a key's goes to that of its place among as many.
    pub(super) sums: &'a mut [[f32; SUMS]],
    /// Sum of `exp(score - max) * v` so far, `[queries, head_dim]`.
    pub(super) output: &'a mut [f32],
    /// Columns of `output`.
    pub(super) head_dim: usize,
    /// The block's first query.
    pub(super) first_query: usize,
}

simd_kernel! {
    /// Replaces a rectangle's scores by `exp(score - max)`, where `max` includes them, and rescales what the
    /// earlier ones left to that `max` (online softmax).
    ///
    /// # Shapes
    /// `scores` has a row of [`ROW_STRIDE`] per query of the span.
    pub(super) fn online_softmax<S>(
        span: &Span,
        visible: &VisibleRanges,
        scores: &mut [f32],
        running: &mut Running<'_>,
    ) {
        // All rows' maxima first: a row's powers wait for its maximum, which comes out of a chain of comparisons.
        for (query, row) in span.queries.clone().zip(scores.chunks_mut(ROW_STRIDE)) {
            let (seen, row) = visible_part(span, visible, query, row);
            hide(row, &seen);
            let index = query - running.first_query;
            // Seldom, after the first keys: the row's maximum itself does not have to be known.
            if any_above(&largest(row), running.max[index]) {
                raise_max(running, index, row);
            }
        }
        for (query, row) in span.queries.clone().zip(scores.chunks_mut(ROW_STRIDE)) {
            let (seen, row) = visible_part(span, visible, query, row);
            let index = query - running.first_query;
            if seen.is_empty() {
                row.fill(0.0);
            } else {
                add_powers::<S>(row, running.max[index], &mut running.sums[index]);
            }
        }
    }
}

simd_kernel! {
    /// Refers a query's sums to the largest element of the row.
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

/// What the softmax's backward reads per query; the slices start with the rectangle's first query.
pub(super) struct RowTerms<'a> {
    /// Log-denominators.
    pub(super) lse: &'a [f32],
    /// `rowsum(o * dout)`.
    pub(super) delta: &'a [f32],
}

simd_kernel! {
    /// Turns scores into probabilities `p = exp(score - lse)` and their gradients `dp` into those of the
    /// scores, `p * (dp - delta)`.
    ///
    /// # Shapes
    /// `scores` and `gradients` have a row of [`ROW_STRIDE`] per query of the span.
    pub(super) fn softmax_backward<S>(
        span: &Span,
        visible: &VisibleRanges,
        terms: &RowTerms<'_>,
        scores: &mut [f32],
        gradients: &mut [f32],
    ) {
        let rows = scores.chunks_mut(ROW_STRIDE).zip(gradients.chunks_mut(ROW_STRIDE));
        let terms = terms.lse.iter().zip(terms.delta);
        for ((query, (scores, gradients)), (&lse, &delta)) in span.queries.clone().zip(rows).zip(terms) {
            let (seen, scores) = visible_part(span, visible, query, scores);
            let gradients = &mut gradients[..scores.len()];
            if seen.is_empty() {
                scores.fill(0.0);
                gradients.fill(0.0);
                continue;
            }
            hide(scores, &seen);
            for (score, gradient) in scores.iter_mut().zip(gradients.iter_mut()) {
                let p = exp::<S>(*score - lse);
                *score = p;
                *gradient = p * (*gradient - delta);
            }
        }
    }
}

/// What the query sees of the span's keys, counted from the first of them, and the row up to whole vectors.
#[inline(always)]
fn visible_part<'a>(
    span: &Span,
    visible: &VisibleRanges,
    query: usize,
    row: &'a mut [f32],
) -> (Range<usize>, &'a mut [f32]) {
    let seen = intersect(&visible.of(query), &span.keys);
    let padded = span.keys.len().next_multiple_of(LANES);
    (seen.start - span.keys.start..seen.end - span.keys.start, &mut row[..padded])
}

/// Sets everything but the visible part to -inf.
#[inline(always)]
fn hide(row: &mut [f32], seen: &Range<usize>) {
    row[..seen.start].fill(f32::NEG_INFINITY);
    row[seen.end..].fill(f32::NEG_INFINITY);
}

/// The largest of every [`LANES`]th element of the row.
#[inline(always)]
fn largest(row: &[f32]) -> Lanes {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in row.as_chunks::<LANES>().0 {
        lanes = max_lanes(&lanes, chunk);
    }
    lanes
}

/// Looks at all lanes, as vectors do.
#[inline(always)]
fn any_above(lanes: &Lanes, bound: f32) -> bool {
    let mut any = false;
    for lane in lanes {
        any |= *lane > bound;
    }
    any
}

/// Replaces the row by `exp(element - max)` and adds every [`SUMS`]th to its sum.
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
