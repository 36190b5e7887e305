//! SwiGLU on slices: one pass, elementwise.

use crate::ops::parallel::rows_per_block;
use crate::ops::simd::{Isa, exp, simd_kernel};
use rayon::prelude::*;

pub(super) fn forward(gate: &[f32], up: &[f32], y: &mut [f32]) {
    let block = rows_per_block(y.len(), 1);
    (gate.par_chunks(block), up.par_chunks(block), y.par_chunks_mut(block))
        .into_par_iter()
        .for_each(|(gate, up, y)| forward_block(gate, up, y));
}

simd_kernel! {
    fn forward_block<S>(gate: &[f32], up: &[f32], y: &mut [f32]) {
        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
            *y = g * sigmoid::<S>(*g) * u;
        }
    }
}

pub(super) fn backward(dy: &[f32], gate: &[f32], up: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
    let block = rows_per_block(dy.len(), 1);
    let inputs = (dy.par_chunks(block), gate.par_chunks(block), up.par_chunks(block));
    let outputs = (dgate.par_chunks_mut(block), dup.par_chunks_mut(block));
    (inputs.0, inputs.1, inputs.2, outputs.0, outputs.1)
        .into_par_iter()
        .for_each(|(dy, gate, up, dgate, dup)| backward_block(dy, gate, up, dgate, dup));
}

simd_kernel! {
    fn backward_block<S>(dy: &[f32], gate: &[f32], up: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
        let inputs = dy.iter().zip(gate).zip(up);
        for ((((dy, g), u), dgate), dup) in inputs.zip(dgate).zip(dup) {
            let s = sigmoid::<S>(*g);
            let silu = g * s;
            *dup = dy * silu;
            // silu′(g) = σ + g·σ·(1 − σ)
            *dgate = dy * u * S::mul_add(silu, 1.0 - s, s);
        }
    }
}

#[inline(always)]
fn sigmoid<S: Isa>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<S>(-x))
}
