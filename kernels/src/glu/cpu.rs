//! SwiGLU on slices: one pass, elementwise.

use crate::cast::{Before, PIECE, Pieces};
use crate::parallel::rows_per_block;
use crate::simd::{Isa, exp, simd_kernel};
use rayon::prelude::*;

pub(super) fn forward<T: Pieces>(gate: &[T], up: &[T], y: &mut [T]) {
    let block = rows_per_block(y.len(), 1);
    let blocks = (gate.par_chunks(block), up.par_chunks(block), y.par_chunks_mut(block)).into_par_iter();
    blocks.for_each_init(Default::default, |[a, b, c]: &mut [Vec<f32>; 3], (gate, up, y)| {
        for ((gate, up), y) in gate.chunks(PIECE).zip(up.chunks(PIECE)).zip(y.chunks_mut(PIECE)) {
            let (gate, up) = (T::read(gate, a), T::read(up, b));
            T::update(y, Before::Garbage, c, |y| forward_piece(gate, up, y));
        }
    });
}

simd_kernel! {
    fn forward_piece<S>(gate: &[f32], up: &[f32], y: &mut [f32]) {
        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
            *y = g * sigmoid::<S>(*g) * u;
        }
    }
}

pub(super) fn backward<T: Pieces>([dy, gate, up]: [&[T]; 3], [dgate, dup]: [&mut [T]; 2]) {
    let block = rows_per_block(dy.len(), 1);
    let inputs = (dy.par_chunks(block), gate.par_chunks(block), up.par_chunks(block));
    let outputs = (dgate.par_chunks_mut(block), dup.par_chunks_mut(block));
    let blocks = (inputs.0, inputs.1, inputs.2, outputs.0, outputs.1).into_par_iter();
    blocks.for_each_init(Default::default, |buffers: &mut [Vec<f32>; 5], (dy, gate, up, dgate, dup)| {
        let [a, b, c, d, e] = buffers;
        let inputs = dy.chunks(PIECE).zip(gate.chunks(PIECE)).zip(up.chunks(PIECE));
        let outputs = dgate.chunks_mut(PIECE).zip(dup.chunks_mut(PIECE));
        for (((dy, gate), up), (dgate, dup)) in inputs.zip(outputs) {
            let (dy, gate, up) = (T::read(dy, a), T::read(gate, b), T::read(up, c));
            T::update(dgate, Before::Garbage, d, |dgate| {
                T::update(dup, Before::Garbage, e, |dup| backward_piece(dy, gate, up, dgate, dup));
            });
        }
    });
}

simd_kernel! {
    fn backward_piece<S>(dy: &[f32], gate: &[f32], up: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
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
