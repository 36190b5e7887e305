//! The two halves of a step on slices, one task per chunk of a segment.

use super::segments::{Segments, SquaredNorms};
use super::{Factors, LambParams};
use crate::simd::{simd_kernel, sum_of_squares};
use rayon::prelude::*;

pub(super) fn direction(
    param: &[f32],
    [grad, exp_avg, exp_avg_sq]: [&mut [f32]; 3],
    segments: &Segments,
    params: &LambParams,
) -> Vec<SquaredNorms> {
    let factors = Factors::new(params);
    let [grad, exp_avg, exp_avg_sq] = [grad, exp_avg, exp_avg_sq].map(|whole| segments.split_mut(whole));
    let of_chunks: Vec<_> = (segments.chunks(), grad, exp_avg, exp_avg_sq)
        .into_par_iter()
        .map(|(chunk, grad, exp_avg, exp_avg_sq)| {
            let param = &param[chunk.elems.clone()];
            direction_of_chunk(param, grad, exp_avg, exp_avg_sq, factors);
            SquaredNorms { param: squares_of_chunk(param), direction: squares_of_chunk(grad) }
        })
        .collect();
    segments.sum(of_chunks)
}

pub(super) fn apply(param: &mut [f32], direction: &[f32], segments: &Segments, step_sizes: &[f32]) {
    (segments.chunks(), segments.split_mut(param)).into_par_iter().for_each(|(chunk, param)| {
        move_chunk(param, &direction[chunk.elems.clone()], step_sizes[chunk.segment]);
    });
}

simd_kernel! {
    fn direction_of_chunk<S>(
        param: &[f32],
        grad: &mut [f32],
        exp_avg: &mut [f32],
        exp_avg_sq: &mut [f32],
        f: Factors,
    ) {
        for (((p, g), m), v) in param.iter().zip(grad).zip(exp_avg).zip(exp_avg_sq) {
            let scaled = *g * f.grad_scale;
            *m = S::mul_add(f.one_minus_beta1, scaled - *m, *m);
            *v = S::mul_add(f.one_minus_beta2 * scaled, scaled, f.beta2 * *v);
            let denominator = S::mul_add(v.sqrt(), f.root_scale, f.eps);
            *g = S::mul_add(f.weight_decay, *p, *m * f.mean_scale / denominator);
        }
    }
}

simd_kernel! {
    fn squares_of_chunk<S>(x: &[f32]) -> f64 {
        sum_of_squares(x)
    }
}

simd_kernel! {
    fn move_chunk<S>(param: &mut [f32], direction: &[f32], step_size: f32) {
        for (p, u) in param.iter_mut().zip(direction) {
            *p = S::mul_add(-step_size, *u, *p);
        }
    }
}
