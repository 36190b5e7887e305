//! Rounding to an element type in f64, by the definition of the format.

use candle_core::DType;

/// The value of `dtype` nearest to `x`; of two equally near, the one with an even last digit. Infinite beyond
/// the largest value by half a last digit or more. NaN for types other than f32, bf16 and f16.
#[must_use]
pub fn round(x: f64, dtype: DType) -> f64 {
    // Binary digits, including the leading 1, and the exponents of the smallest and largest normal numbers.
    let (digits, min_exponent, max_exponent) = match dtype {
        DType::F32 => (24, -126, 127),
        DType::BF16 => (8, -126, 127),
        DType::F16 => (11, -14, 15),
        _ => return f64::NAN,
    };
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let exponent = exponent(x).max(min_exponent);
    let last_digit = f64::from(exponent - digits + 1).exp2();
    let rounded = (x / last_digit).round_ties_even() * last_digit;
    let bound = f64::from(max_exponent + 1).exp2();
    if rounded.abs() >= bound { f64::INFINITY.copysign(x) } else { rounded }
}

/// The e with 2ᵉ ≤ |x| < 2ᵉ⁺¹.
fn exponent(x: f64) -> i32 {
    let mut exponent = x.abs().log2().floor() as i32;
    // The logarithm may be rounded up to the next integer.
    while f64::from(exponent).exp2() > x.abs() {
        exponent -= 1;
    }
    exponent
}
