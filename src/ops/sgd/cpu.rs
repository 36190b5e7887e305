//! One pass over the slices of a step.

use super::SgdParams;
use crate::ops::parallel::rows_per_block;
use crate::ops::simd::simd_kernel;
use rayon::prelude::*;

pub(super) fn step(param: &mut [f32], grad: &[f32], params: &SgdParams) {
    let factors = Factors::new(params);
    let block = rows_per_block(param.len(), 1);
    (param.par_chunks_mut(block), grad.par_chunks(block))
        .into_par_iter()
        .for_each(|(param, grad)| plain_block(param, grad, factors));
}

pub(super) fn step_with_momentum(param: &mut [f32], grad: &[f32], buffer: &mut [f32], params: &SgdParams) {
    if params.step == 1 {
        // Nothing has been accumulated yet, and the buffer may hold anything, even NaN.
        buffer.fill(0.0);
    }
    let factors = Factors::new(params);
    let block = rows_per_block(param.len(), 1);
    (param.par_chunks_mut(block), grad.par_chunks(block), buffer.par_chunks_mut(block))
        .into_par_iter()
        .for_each(|(param, grad, buffer)| match params.nesterov {
            true => nesterov_block(param, grad, buffer, factors),
            false => momentum_block(param, grad, buffer, factors),
        });
}

/// The constants of one step, rounded once.
#[derive(Clone, Copy)]
struct Factors {
    lr: f32,
    momentum: f32,
    weight_decay: f32,
    grad_scale: f32,
}

impl Factors {
    fn new(params: &SgdParams) -> Self {
        Self {
            lr: params.lr as f32,
            momentum: params.momentum as f32,
            weight_decay: params.weight_decay as f32,
            grad_scale: params.grad_scale as f32,
        }
    }
}

simd_kernel! {
    fn plain_block<S>(param: &mut [f32], grad: &[f32], f: Factors) {
        for (p, g) in param.iter_mut().zip(grad) {
            let g = S::mul_add(f.weight_decay, *p, g * f.grad_scale);
            *p = S::mul_add(-f.lr, g, *p);
        }
    }
}

simd_kernel! {
    fn momentum_block<S>(param: &mut [f32], grad: &[f32], buffer: &mut [f32], f: Factors) {
        for ((p, g), b) in param.iter_mut().zip(grad).zip(buffer) {
            let g = S::mul_add(f.weight_decay, *p, g * f.grad_scale);
            *b = S::mul_add(f.momentum, *b, g);
            *p = S::mul_add(-f.lr, *b, *p);
        }
    }
}

simd_kernel! {
    fn nesterov_block<S>(param: &mut [f32], grad: &[f32], buffer: &mut [f32], f: Factors) {
        for ((p, g), b) in param.iter_mut().zip(grad).zip(buffer) {
            let g = S::mul_add(f.weight_decay, *p, g * f.grad_scale);
            *b = S::mul_add(f.momentum, *b, g);
            *p = S::mul_add(-f.lr, S::mul_add(f.momentum, *b, g), *p);
        }
    }
}
