//! The exponential function of the softmax.

use crate::simd::Isa;

/// `e^x` with a relative error of 1.2e-7 for `x` from -87.3 to 88. It is 0 from -88 down, less exact in
/// between, where results are subnormal, and the value at 88 above. NaN stays NaN. Loops over it vectorize.
///
/// A softmax needs no more: its arguments are at most 0, and -inf marks masked keys. Without the subnormal
/// and infinite results of [`crate::simd::exp`] it has a third fewer operations. The method is the same: `x =
/// n ln 2 + r` with `|r| <= ln 2 / 2`. The polynomial for `e^r` is the minimax polynomial of its degree, with
/// a relative error of 2e-9.
#[inline(always)]
pub(super) fn exp<S: Isa>(x: f32) -> f32 {
    /// There `n` is -127, and the resulting bits are those of 0.
    const SMALLEST: f32 = -88.0;
    const LARGEST: f32 = 88.0;
    /// 1.5 * 2^23: adding it rounds to an integer, which is then in the low mantissa bits. Plus 127, which
    /// makes them the bits of an exponent.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = -2.121_944_4e-4;

    // Comparisons rather than `clamp`, so that NaN passes through.
    let clamped = if x < SMALLEST { SMALLEST } else { x };
    let clamped = if clamped > LARGEST { LARGEST } else { clamped };
    let rounded = S::mul_add(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = S::mul_add(n, -LN_2_LOW, S::mul_add(n, -LN_2_HIGH, clamped));

    let mut p = 1.384_360_7e-3;
    p = S::mul_add(p, r, 8.374_196e-3);
    p = S::mul_add(p, r, 4.166_800_5e-2);
    p = S::mul_add(p, r, 1.666_643e-1);
    p = S::mul_add(p, r, 4.999_999_4e-1);
    p = S::mul_add(p, r, 1.0);
    p = S::mul_add(p, r, 1.0);

    p * f32::from_bits(rounded.to_bits() << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{at_every_level, simd_kernel};

    simd_kernel! {
        fn exp_all<S>(values: &mut [f32]) {
            for value in values.iter_mut() {
                *value = exp::<S>(*value);
            }
        }
    }

    #[test]
    fn exp_stays_within_1_3e_7_of_libm_where_the_softmax_uses_it() {
        at_every_level(|level| {
            let inputs: Vec<f32> = (0..2_000_000).map(|i| 0.5 - 87.8 * (i as f32) / 2e6).collect();
            let mut outputs = inputs.clone();
            exp_all(&mut outputs);
            let error = |(x, y): (&f32, &f32)| (f64::from(*y) / f64::from(*x).exp() - 1.0).abs();
            let worst = inputs.iter().zip(&outputs).map(error).fold(0.0, f64::max);
            assert!(worst <= 1.3e-7, "{level:?}: relative error {worst:e}");
        });
    }

    #[test]
    fn exp_is_exact_at_zero_flushes_saturates_and_keeps_nan() {
        at_every_level(|level| {
            let mut values =
                [0.0, -0.0, f32::NEG_INFINITY, -88.0, -1e30, 88.0, 1e30, f32::INFINITY, f32::NAN];
            exp_all(&mut values);
            let [zero, neg_zero, neg_inf, small, neg_huge, largest, huge, inf, nan] = values;
            assert_eq!((zero, neg_zero), (1.0, 1.0), "{level:?}");
            assert_eq!((neg_inf, small, neg_huge), (0.0, 0.0, 0.0), "{level:?}");
            assert_eq!((huge, inf), (largest, largest), "{level:?}");
            assert!(largest > 1e38 && largest.is_finite(), "{level:?}: {largest:e}");
            assert!(nan.is_nan(), "{level:?}");
        });
    }
}
