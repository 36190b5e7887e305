//! The rotation on slices.

use super::Direction;
use crate::ops::parallel::rows_per_block;
use crate::ops::simd::{Isa, simd_kernel};
use rayon::prelude::*;

/// (cos, sin), each [n, head_dim/2].
pub(super) fn table(position_ids: &[u32], head_dim: usize, theta: f64) -> (Vec<f32>, Vec<f32>) {
    let half = head_dim / 2;
    let frequencies: Vec<f64> = (0..half).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect();
    let (mut cos, mut sin) = (vec![0.0; position_ids.len() * half], vec![0.0; position_ids.len() * half]);
    let rows = rows_per_block(position_ids.len(), half);
    (position_ids.par_chunks(rows), cos.par_chunks_mut(rows * half), sin.par_chunks_mut(rows * half))
        .into_par_iter()
        .for_each(|(position_ids, cos, sin)| {
            let angles = position_ids.iter().flat_map(|p| frequencies.iter().map(move |f| f64::from(*p) * f));
            for ((angle, cos), sin) in angles.zip(cos).zip(sin) {
                let (sin_f64, cos_f64) = angle.sin_cos();
                (*sin, *cos) = (sin_f64 as f32, cos_f64 as f32);
            }
        });
    (cos, sin)
}

/// `row_elems` = heads · head_dim, the elements of one token.
pub(super) fn apply(x: &mut [f32], cos: &[f32], sin: &[f32], row_elems: usize, direction: Direction) {
    if x.is_empty() {
        return;
    }
    let tokens = x.len() / row_elems;
    let half = cos.len() / tokens;
    let rows = rows_per_block(tokens, row_elems);
    let sign = match direction {
        Direction::Forward => 1.0,
        Direction::Backward => -1.0,
    };
    (x.par_chunks_mut(rows * row_elems), cos.par_chunks(rows * half), sin.par_chunks(rows * half))
        .into_par_iter()
        .for_each(|(x, cos, sin)| rotate_rows(x, row_elems, half, cos, sin, sign));
}

simd_kernel! {
    fn rotate_rows<S>(x: &mut [f32], row_elems: usize, half: usize, cos: &[f32], sin: &[f32], sign: f32) {
        let rows = x.chunks_exact_mut(row_elems).zip(cos.chunks_exact(half)).zip(sin.chunks_exact(half));
        for ((x, cos), sin) in rows {
            for head in x.chunks_exact_mut(2 * half) {
                let (first, second) = head.split_at_mut(half);
                rotate_head::<S>(first, second, cos, sin, sign);
            }
        }
    }
}

#[inline(always)]
fn rotate_head<S: Isa>(first: &mut [f32], second: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
    for (((a, b), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let s = s * sign;
        (*a, *b) = (S::mul_add(*a, *c, -(*b * s)), S::mul_add(*b, *c, *a * s));
    }
}
