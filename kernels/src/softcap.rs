//! Soft caps of logits: `cap · tanh(x / cap)`, which stays within ±cap (Gemma 2, arXiv 2408.00118).
//!
//! The derivative is `1 − (y / cap)²` of the result y, so a backward pass needs no other value.

use crate::simd::Isa;

/// The soft cap of one value.
#[inline(always)]
pub(crate) fn softcap<S: Isa>(x: f32, cap: f32) -> f32 {
    cap * tanh::<S>(x / cap)
}

/// The derivative at the result `y`; 0 for an infinite one.
#[inline(always)]
pub(crate) fn slope(y: f32, cap: f32) -> f32 {
    let t = y / cap;
    (1.0 - t * t).max(0.0)
}

/// Beyond it tanh is ±1 in f32.
const SATURATED: f32 = 7.905_311;

/// tanh within a few units in the last place, also near 0: a quotient of polynomials, as in Eigen.
#[inline(always)]
fn tanh<S: Isa>(x: f32) -> f32 {
    let x = x.clamp(-SATURATED, SATURATED);
    let x2 = x * x;
    let polynomial = |coefficients: &[f32]| {
        let mut sum = coefficients[0];
        for coefficient in &coefficients[1..] {
            sum = S::mul_add(sum, x2, *coefficient);
        }
        sum
    };
    let odd = polynomial(&[
        -2.760_768_5e-16,
        2.000_188e-13,
        -8.604_672e-11,
        5.122_297e-8,
        1.485_722_4e-5,
        6.372_619_3e-4,
        4.893_524_6e-3,
    ]);
    let even = polynomial(&[1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3]);
    x * odd / even
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{BaselineIsa, simd_kernel};

    simd_kernel! {
        fn on_this_machine<S>(x: f32, cap: f32) -> f32 {
            softcap::<S>(x, cap)
        }
    }

    #[test]
    fn it_is_within_a_few_units_of_the_last_place_of_every_magnitude() {
        for magnitude in [1e-30, 1e-8, 1e-4, 0.01, 0.3, 1.0, 3.0, 7.9, 8.0, 100.0, 1e30] {
            for x in [magnitude, -1.37 * magnitude] {
                for cap in [1.0f32, 50.0] {
                    let expected = f64::from(cap) * (f64::from(x as f32) / f64::from(cap)).tanh();
                    for got in [softcap::<BaselineIsa>(x as f32, cap), on_this_machine(x as f32, cap)] {
                        let error = (f64::from(got) - expected).abs() / expected.abs();
                        assert!(error < 5e-7, "{x} capped at {cap}: {got}, expected {expected}");
                    }
                }
            }
        }
        assert_eq!(softcap::<BaselineIsa>(0.0, 30.0), 0.0);
        assert!(softcap::<BaselineIsa>(f32::NAN, 30.0).is_nan());
        assert_eq!([slope(0.0, 2.0), slope(1.0, 2.0), slope(f32::NEG_INFINITY, 2.0)], [1.0, 0.75, 0.0]);
    }
}
