//! Gated linear units on slices: one pass, elementwise.

use super::Activation;
use crate::cast::{Before, PIECE, Pieces};
use crate::parallel::rows_per_block;
use crate::simd::{Isa, exp, simd_kernel};
use rayon::prelude::*;

/// Defines the passes over a piece for each activation.
macro_rules! pieces {
    ($($activation:ident: $forward:ident, $backward:ident;)*) => {$(
        simd_kernel! {
            fn $forward<S>(gate: &[f32], up: &[f32], y: &mut [f32]) {
                forward_piece::<S, $activation>(gate, up, y);
            }
        }
        simd_kernel! {
            fn $backward<S>(dy: &[f32], gate: &[f32], up: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
                backward_piece::<S, $activation>(dy, gate, up, dgate, dup);
            }
        }
    )*};
}

pieces! {
    Silu: forward_silu, backward_silu;
    GeluTanh: forward_gelu_tanh, backward_gelu_tanh;
    Gelu: forward_gelu, backward_gelu;
    SquaredRelu: forward_squared_relu, backward_squared_relu;
    Sigmoid: forward_sigmoid, backward_sigmoid;
    Identity: forward_identity, backward_identity;
}

pub(super) fn forward<T: Pieces>(activation: Activation, gate: &[T], up: &[T], y: &mut [T]) {
    let block = rows_per_block(y.len(), 1);
    let blocks = (gate.par_chunks(block), up.par_chunks(block), y.par_chunks_mut(block)).into_par_iter();
    blocks.for_each_init(Default::default, |[a, b, c]: &mut [Vec<f32>; 3], (gate, up, y)| {
        for ((gate, up), y) in gate.chunks(PIECE).zip(up.chunks(PIECE)).zip(y.chunks_mut(PIECE)) {
            let (gate, up) = (T::read(gate, a), T::read(up, b));
            T::update(y, Before::Garbage, c, |y| match activation {
                Activation::Silu => forward_silu(gate, up, y),
                Activation::GeluTanh => forward_gelu_tanh(gate, up, y),
                Activation::Gelu => forward_gelu(gate, up, y),
                Activation::SquaredRelu => forward_squared_relu(gate, up, y),
                Activation::Sigmoid => forward_sigmoid(gate, up, y),
                Activation::Identity => forward_identity(gate, up, y),
            });
        }
    });
}

#[inline(always)]
fn forward_piece<S: Isa, A: Activate>(gate: &[f32], up: &[f32], y: &mut [f32]) {
    for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
        *y = A::at::<S>(*g).value * u;
    }
}

pub(super) fn backward<T: Pieces>(
    activation: Activation,
    dy: &[T],
    gate: &[T],
    up: &[T],
    dgate: &mut [T],
    dup: &mut [T],
) {
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
                T::update(dup, Before::Garbage, e, |dup| match activation {
                    Activation::Silu => backward_silu(dy, gate, up, dgate, dup),
                    Activation::GeluTanh => backward_gelu_tanh(dy, gate, up, dgate, dup),
                    Activation::Gelu => backward_gelu(dy, gate, up, dgate, dup),
                    Activation::SquaredRelu => backward_squared_relu(dy, gate, up, dgate, dup),
                    Activation::Sigmoid => backward_sigmoid(dy, gate, up, dgate, dup),
                    Activation::Identity => backward_identity(dy, gate, up, dgate, dup),
                });
            });
        }
    });
}

#[inline(always)]
fn backward_piece<S: Isa, A: Activate>(
    dy: &[f32],
    gate: &[f32],
    up: &[f32],
    dgate: &mut [f32],
    dup: &mut [f32],
) {
    let inputs = dy.iter().zip(gate).zip(up);
    for ((((dy, g), u), dgate), dup) in inputs.zip(dgate).zip(dup) {
        let Activated { value, slope } = A::at::<S>(*g);
        *dup = dy * value;
        *dgate = dy * u * slope;
    }
}

/// An activation's value and derivative.
struct Activated {
    value: f32,
    slope: f32,
}

trait Activate {
    fn at<S: Isa>(g: f32) -> Activated;
}

struct Silu;

impl Activate for Silu {
    #[inline(always)]
    fn at<S: Isa>(g: f32) -> Activated {
        gated::<S>(g, g, 1.0)
    }
}

struct GeluTanh;

/// √(8/π) and the cubic coefficient of GELU's approximation: (1 + tanh(x)) / 2 = σ(2x).
const SLOPE: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;

/// Beyond it σ is 0 or 1 in f32; a cube could overflow.
const SATURATED: f32 = 12.0;

impl Activate for GeluTanh {
    #[inline(always)]
    fn at<S: Isa>(g: f32) -> Activated {
        let clamped = g.clamp(-SATURATED, SATURATED);
        let z = SLOPE * clamped * S::mul_add(CUBIC * clamped, clamped, 1.0);
        gated::<S>(g, z, SLOPE * S::mul_add(3.0 * CUBIC * clamped, clamped, 1.0))
    }
}

struct Gelu;

impl Activate for Gelu {
    #[inline(always)]
    fn at<S: Isa>(g: f32) -> Activated {
        /// 1 / √(2π)
        const PEAK: f32 = 0.398_942_3;
        let cumulative = S::mul_add(0.5, erf::<S>(g * std::f32::consts::FRAC_1_SQRT_2), 0.5);
        let slope = S::mul_add(g, PEAK * exp::<S>(-0.5 * g * g), cumulative);
        Activated { value: g * cumulative, slope }
    }
}

struct SquaredRelu;

impl Activate for SquaredRelu {
    #[inline(always)]
    fn at<S: Isa>(g: f32) -> Activated {
        let positive = if g > 0.0 { g } else { 0.0 };
        Activated { value: positive * positive, slope: 2.0 * positive }
    }
}

struct Sigmoid;

impl Activate for Sigmoid {
    #[inline(always)]
    fn at<S: Isa>(g: f32) -> Activated {
        // 1 − σ(g) as σ(−g), which does not cancel.
        let s = sigmoid::<S>(g);
        Activated { value: s, slope: s * sigmoid::<S>(-g) }
    }
}

struct Identity;

impl Activate for Identity {
    #[inline(always)]
    fn at<S: Isa>(g: f32) -> Activated {
        Activated { value: g, slope: 1.0 }
    }
}

/// g · σ(z), and its derivative σ + g · σ · (1 − σ) · z′.
#[inline(always)]
fn gated<S: Isa>(g: f32, z: f32, slope: f32) -> Activated {
    let s = sigmoid::<S>(z);
    let value = g * s;
    Activated { value, slope: S::mul_add(value * slope, 1.0 - s, s) }
}

#[inline(always)]
fn sigmoid<S: Isa>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<S>(-x))
}

/// The error function, within 1 ulp. Both minimax polynomials are computed, so that loops over it vectorize.
#[inline(always)]
fn erf<S: Isa>(x: f32) -> f32 {
    /// Between the polynomials.
    const BOUND: f32 = 0.927_734_4;
    let (size, square) = (x.abs(), x * x);
    let mut near = -5.967_617e-4;
    for coefficient in [4.991_194e-3, -2.676_813_5e-2, 1.128_199_25e-1, -3.761_253_4e-1, 1.283_791_7e-1] {
        near = S::mul_add(near, square, coefficient);
    }
    // 1 − exp(polynomial)
    let odd = S::mul_add(-3.883_964_4e-3, size, 2.425_462_2e-2);
    let mut far = S::mul_add(S::mul_add(-1.728_534_7e-5, size, 3.831_971_3e-4), square, odd);
    for coefficient in [-1.067_778_8e-1, -6.348_467e-1, -1.287_175_1e-1] {
        far = S::mul_add(far, size, coefficient);
    }
    let far = 1.0 - exp::<S>(S::mul_add(far, size, -size));
    if size > BOUND { far.copysign(x) } else { S::mul_add(near, x, x) }
}
