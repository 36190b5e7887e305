//! The rotation on slices.

use super::{Direction, HeadPairs, Rope, Table};
use crate::cast::{Before, Pieces, rows_per_piece};
use crate::parallel::rows_per_block;
use crate::simd::{Isa, simd_kernel};
use rayon::prelude::*;

/// The angle of each pair per position, for each token.
pub(super) struct Frequencies {
    /// [pairs] each; one for all tokens, unless documents of different lengths differ.
    by_len: Vec<Vec<f64>>,
    /// Index of each token's frequencies; empty if all tokens share one.
    of_token: Vec<usize>,
}

impl Frequencies {
    pub(super) fn new(rope: &Rope, head_dim: usize, document_lens: &[u32]) -> Self {
        let scaled_lens: Vec<u32> = document_lens.iter().map(|len| rope.scaled_len(*len)).collect();
        let mut lens = scaled_lens.clone();
        lens.sort_unstable();
        lens.dedup();
        if lens.len() <= 1 {
            let len = lens.first().copied().unwrap_or(0);
            return Self { by_len: vec![rope.frequencies(head_dim, len)], of_token: Vec::new() };
        }
        let of_token = scaled_lens.iter().map(|len| lens.partition_point(|known| known < len)).collect();
        Self { by_len: lens.iter().map(|len| rope.frequencies(head_dim, *len)).collect(), of_token }
    }

    fn pairs(&self) -> usize {
        self.by_len[0].len()
    }

    fn of(&self, token: usize) -> &[f64] {
        &self.by_len[self.of_token.get(token).copied().unwrap_or(0)]
    }
}

/// (cos, sin), each [n, pairs], times the amplitude.
pub(super) fn table(position_ids: &[u32], frequencies: &Frequencies, rope: &Rope) -> (Vec<f32>, Vec<f32>) {
    let pairs = frequencies.pairs();
    let (mut cos, mut sin) = (vec![0.0; position_ids.len() * pairs], vec![0.0; position_ids.len() * pairs]);
    let rows = rows_per_block(position_ids.len(), pairs);
    (position_ids.par_chunks(rows), cos.par_chunks_mut(rows * pairs), sin.par_chunks_mut(rows * pairs))
        .into_par_iter()
        .enumerate()
        .for_each(|(block, (position_ids, cos, sin))| {
            let tokens = position_ids.iter().zip(block * rows..);
            let angles = tokens.flat_map(|(position, token)| {
                let amplitude = rope.amplitude(*position);
                let angle = move |frequency| (f64::from(*position) * frequency, amplitude);
                frequencies.of(token).iter().map(angle)
            });
            for (((angle, amplitude), cos), sin) in angles.zip(cos).zip(sin) {
                let (sin_f64, cos_f64) = angle.sin_cos();
                (*sin, *cos) = ((amplitude * sin_f64) as f32, (amplitude * cos_f64) as f32);
            }
        });
    (cos, sin)
}

/// `row_elems` = heads · head_dim, the elements of one token.
pub(super) fn apply<T: Pieces>(x: &mut [T], table: &Table, row_elems: usize, direction: Direction) {
    if x.is_empty() {
        return;
    }
    let Table { cos, sin, heads, .. } = table;
    let pairs = heads.pairs;
    let rows = rows_per_block(x.len() / row_elems, row_elems);
    let sign = match direction {
        Direction::Forward => 1.0,
        Direction::Backward => -1.0,
    };
    let piece = rows_per_piece(row_elems);
    (x.par_chunks_mut(rows * row_elems), cos.par_chunks(rows * pairs), sin.par_chunks(rows * pairs))
        .into_par_iter()
        .for_each_init(Vec::new, |buffer, (x, cos, sin)| {
            let angles = cos.chunks(piece * pairs).zip(sin.chunks(piece * pairs));
            for (x, (cos, sin)) in x.chunks_mut(piece * row_elems).zip(angles) {
                T::update(x, Before::Values, buffer, |x| rotate_rows(x, row_elems, *heads, cos, sin, sign));
            }
        });
}

simd_kernel! {
    fn rotate_rows<S>(x: &mut [f32], row_elems: usize, heads: HeadPairs, cos: &[f32], sin: &[f32], sign: f32) {
        let HeadPairs { head_dim, pairs, interleaved } = heads;
        let rows = x.chunks_exact_mut(row_elems).zip(cos.chunks_exact(pairs)).zip(sin.chunks_exact(pairs));
        for ((x, cos), sin) in rows {
            for head in x.chunks_exact_mut(head_dim) {
                let rotating = &mut head[..2 * pairs];
                if interleaved {
                    rotate_neighbors::<S>(rotating, cos, sin, sign);
                } else {
                    rotate_halves::<S>(rotating, cos, sin, sign);
                }
            }
        }
    }
}

#[inline(always)]
fn rotate_halves<S: Isa>(x: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
    let (first, second) = x.split_at_mut(cos.len());
    for (((a, b), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = rotated::<S>(*a, *b, *c, *s * sign);
    }
}

#[inline(always)]
fn rotate_neighbors<S: Isa>(x: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
    for ((pair, c), s) in x.chunks_exact_mut(2).zip(cos).zip(sin) {
        (pair[0], pair[1]) = rotated::<S>(pair[0], pair[1], *c, *s * sign);
    }
}

#[inline(always)]
fn rotated<S: Isa>(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (S::mul_add(a, cos, -(b * sin)), S::mul_add(b, cos, a * sin))
}
