//! One pass over the four slices of a step.

use super::AdamParams;
use crate::ops::parallel::rows_per_block;
use crate::ops::simd::simd_kernel;
use rayon::prelude::*;

pub(super) fn step(
    param: &mut [f32],
    grad: &[f32],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    params: &AdamParams,
) {
    let factors = Factors::new(params);
    let block = rows_per_block(param.len(), 1);
    (
        param.par_chunks_mut(block),
        grad.par_chunks(block),
        exp_avg.par_chunks_mut(block),
        exp_avg_sq.par_chunks_mut(block),
    )
        .into_par_iter()
        .for_each(|(param, grad, exp_avg, exp_avg_sq)| {
            step_block(param, grad, exp_avg, exp_avg_sq, factors);
        });
}

/// The constants of one step, computed in f64 and rounded once.
#[derive(Clone, Copy)]
struct Factors {
    grad_scale: f32,
    /// Weight decay that goes into the gradient (0 when decoupled).
    coupled_decay: f32,
    /// The fraction of a parameter that decoupled decay takes (0 when coupled). `1 − lr · weight_decay`
    /// would lose most digits of a small decay.
    decoupled_decay: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    /// lr / (1 − β₁ᵗ)
    step_size: f32,
    /// 1 / √(1 − β₂ᵗ)
    root_scale: f32,
    eps: f32,
}

impl Factors {
    fn new(params: &AdamParams) -> Self {
        let AdamParams { lr, beta1, beta2, weight_decay, .. } = *params;
        let t = params.step as f64;
        let (correction1, correction2) = match params.bias_correction {
            true => (1.0 - beta1.powf(t), 1.0 - beta2.powf(t)),
            false => (1.0, 1.0),
        };
        Self {
            grad_scale: params.grad_scale as f32,
            coupled_decay: if params.decoupled { 0.0 } else { weight_decay as f32 },
            decoupled_decay: if params.decoupled { (lr * weight_decay) as f32 } else { 0.0 },
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            step_size: (lr / correction1) as f32,
            root_scale: (1.0 / correction2.sqrt()) as f32,
            eps: params.eps as f32,
        }
    }
}

simd_kernel! {
    fn step_block<S>(param: &mut [f32], grad: &[f32], exp_avg: &mut [f32], exp_avg_sq: &mut [f32], f: Factors) {
        for (((p, g), m), v) in param.iter_mut().zip(grad).zip(exp_avg).zip(exp_avg_sq) {
            let g = S::mul_add(f.coupled_decay, *p, g * f.grad_scale);
            *m = S::mul_add(f.one_minus_beta1, g - *m, *m);
            *v = S::mul_add(f.one_minus_beta2 * g, g, f.beta2 * *v);
            let denominator = S::mul_add(v.sqrt(), f.root_scale, f.eps);
            let kept = S::mul_add(-f.decoupled_decay, *p, *p);
            *p = S::mul_add(-f.step_size, *m / denominator, kept);
        }
    }
}
