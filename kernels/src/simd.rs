//! Runtime SIMD dispatch, and vectorizable building blocks of kernels.
//!
//! A kernel is written once, as plain loops over slices inside `simd_kernel!`. The macro compiles the body
//! three times, for AVX-512, AVX2 with FMA, and the target's baseline, and selects one at run time; the
//! compiler vectorizes each. Reductions keep `LANES` partial results, since the compiler must not reorder
//! floating-point sums. The order is the same at every level.
//!
//! Functions that a body calls must be `#[inline(always)]`, and closures are not allowed. A function that is
//! not inlined is compiled for the baseline, where a fused multiply-add is a libm call and `exp` is 20 times
//! slower.

use std::sync::LazyLock;

/// Partial results of a reduction: two AVX-512 registers, enough to hide the latency of an addition.
pub(super) const LANES: usize = 32;

/// The instruction sets that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The baseline of the compilation target.
    Baseline,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Level {
    /// The best level of this machine.
    #[must_use]
    pub fn detect() -> Self {
        static DETECTED: LazyLock<Level> = LazyLock::new(Level::ask);
        *DETECTED
    }

    fn ask() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let fma = std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma");
            let avx512 = std::is_x86_feature_detected!("avx512f")
                && std::is_x86_feature_detected!("avx512bw")
                && std::is_x86_feature_detected!("avx512dq")
                && std::is_x86_feature_detected!("avx512vl");
            if fma && avx512 {
                return Self::Avx512;
            }
            if fma {
                return Self::Avx2;
            }
        }
        Self::Baseline
    }

    /// The level to run at: the best one, or a lower one in tests.
    pub(super) fn current() -> Self {
        #[cfg(test)]
        if let Some(limit) = LIMIT.get() {
            return limit.min(Self::detect());
        }
        Self::detect()
    }
}

#[cfg(test)]
thread_local! {
    static LIMIT: std::cell::Cell<Option<Level>> = const { std::cell::Cell::new(None) };
}

/// Runs `test` once per level that this machine supports. Only kernels on the calling thread are affected, so
/// the data must be too small to be shared among threads.
#[cfg(test)]
pub(super) fn at_every_level(mut test: impl FnMut(Level)) {
    for level in [Level::Baseline, Level::Avx2, Level::Avx512] {
        if level <= Level::detect() {
            LIMIT.set(Some(level));
            test(level);
        }
    }
    LIMIT.set(None);
}

/// The one operation whose code differs between levels.
pub(super) trait Isa {
    /// `a·b + c`, rounded once with a fused instruction and twice without.
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// Levels with a fused multiply-add instruction.
pub(super) struct Fused;

/// Levels without one: there `f32::mul_add` is a library call, two hundred times slower.
pub(super) struct Separate;

impl Isa for Fused {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Isa for Separate {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// The multiply-add of [`Level::Baseline`]: aarch64 always has the fused instruction.
#[cfg(target_arch = "aarch64")]
pub(super) type BaselineIsa = Fused;
/// The multiply-add of [`Level::Baseline`].
#[cfg(not(target_arch = "aarch64"))]
pub(super) type BaselineIsa = Separate;

/// Defines `fn name<S>(arguments) -> output { body }`, compiled per [`Level`] and dispatched at run time.
/// Inside the body, `S` is the level's [`Isa`]; the resulting function has no such parameter.
macro_rules! simd_kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$isa:ident>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$isa: $crate::simd::Isa>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                use $crate::simd::{Fused, Level};

                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    body::<Fused>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body::<Fused>($($arg),*)
                }
                match Level::current() {
                    // SAFETY: `Level::current` never exceeds what `Level::detect` found on this machine.
                    Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Level::Avx2 => return unsafe { avx2($($arg),*) },
                    Level::Baseline => {}
                }
            }
            body::<$crate::simd::BaselineIsa>($($arg),*)
        }
    };
}
pub(super) use simd_kernel;

/// A generic kernel: the trait counterpart of `simd_kernel!`.
pub(super) trait SimdKernel {
    /// The kernel's body, `#[inline(always)]`.
    fn run<S: Isa>(self);
}

/// Runs a kernel compiled for this machine's [`Level`].
pub(super) fn dispatch<K: SimdKernel>(kernel: K) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn avx512<K: SimdKernel>(kernel: K) {
            kernel.run::<Fused>();
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2<K: SimdKernel>(kernel: K) {
            kernel.run::<Fused>();
        }
        match Level::current() {
            // SAFETY: `Level::current` never exceeds what `Level::detect` found on this machine.
            Level::Avx512 => return unsafe { avx512(kernel) },
            // SAFETY: as above.
            Level::Avx2 => return unsafe { avx2(kernel) },
            Level::Baseline => {}
        }
    }
    kernel.run::<BaselineIsa>();
}

/// eˣ with a relative error below 2e-7: ∞ above 88.73, subnormal and then 0 below −87.3, NaN for NaN.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2. The polynomial for eʳ and the split of ln 2 are from Cephes (`expf`,
/// S. Moshier). Branch-free, so that loops over it vectorize.
#[inline(always)]
pub(super) fn exp<S: Isa>(x: f32) -> f32 {
    /// 1.5·2²³: adding it rounds to an integer, which is then in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = -2.121_944_4e-4;

    // Comparisons instead of `clamp` or `min`, so that NaN passes through. Beyond the bounds the result is ∞
    // or 0 already; inside them n fits the exponent arithmetic below.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -105.0 { -105.0 } else { x };
    let rounded = S::mul_add(x, std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = S::mul_add(n, -LN_2_LOW, S::mul_add(n, -LN_2_HIGH, x));

    let mut p = 1.987_569_1e-4;
    p = S::mul_add(p, r, 1.398_199_9e-3);
    p = S::mul_add(p, r, 8.333_452e-3);
    p = S::mul_add(p, r, 4.166_579_6e-2);
    p = S::mul_add(p, r, 1.666_666_5e-1);
    p = S::mul_add(p, r, 0.5);
    p = S::mul_add(p * r, r, r) + 1.0;

    // 2ⁿ in two factors, each within the exponent's range, although 2ⁿ may not be.
    let n = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// The partial results of a reduction.
pub(super) type Lanes = [f32; LANES];

/// Σ a·b. Both slices must have the same length.
#[inline(always)]
pub(super) fn dot<S: Isa>(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        sums = mul_add_lanes::<S>(a, b, &sums);
    }
    if !a_tail.is_empty() {
        sums = mul_add_lanes::<S>(&padded(a_tail, 0.0), &padded(b_tail, 0.0), &sums);
    }
    sum_of_lanes(sums)
}

/// Σ a·b·c. All slices must have the same length.
#[inline(always)]
pub(super) fn dot3<S: Isa>(a: &[f32], b: &[f32], c: &[f32]) -> f32 {
    let (a, a_tail) = a.as_chunks::<LANES>();
    let (b, b_tail) = b.as_chunks::<LANES>();
    let (c, c_tail) = c.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        sums = mul_add_lanes::<S>(&mul_lanes(a, b), c, &sums);
    }
    if !a_tail.is_empty() {
        let product = mul_lanes(&padded(a_tail, 0.0), &padded(b_tail, 0.0));
        sums = mul_add_lanes::<S>(&product, &padded(c_tail, 0.0), &sums);
    }
    sum_of_lanes(sums)
}

/// Σ x² in f64, where the square of an f32 is exact, so fusing would change nothing.
#[inline(always)]
pub(super) fn sum_of_squares(x: &[f32]) -> f64 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut lanes = [0.0f64; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            let value = f64::from(chunk[lane]);
            lanes[lane] += value * value;
        }
    }
    for (lane, value) in lanes.iter_mut().zip(tail) {
        *lane += f64::from(*value) * f64::from(*value);
    }
    lanes.iter().sum()
}

/// The last elements of a slice, padded with `filler`. Padding keeps the partial results in registers; a loop
/// over single elements would index the array at run time and put it in memory.
#[inline(always)]
pub(super) fn padded(tail: &[f32], filler: f32) -> Lanes {
    let mut lanes = [filler; LANES];
    lanes[..tail.len()].copy_from_slice(tail);
    lanes
}

#[inline(always)]
fn mul_lanes(a: &Lanes, b: &Lanes) -> Lanes {
    let mut product = *a;
    for lane in 0..LANES {
        product[lane] *= b[lane];
    }
    product
}

#[inline(always)]
fn mul_add_lanes<S: Isa>(a: &Lanes, b: &Lanes, c: &Lanes) -> Lanes {
    let mut sums = *c;
    for lane in 0..LANES {
        sums[lane] = S::mul_add(a[lane], b[lane], sums[lane]);
    }
    sums
}

/// The larger of each two lanes. `b` counts only if it compares greater, so its NaNs are ignored.
#[inline(always)]
pub(super) fn max_lanes(a: &Lanes, b: &Lanes) -> Lanes {
    let mut max = *a;
    for lane in 0..LANES {
        max[lane] = if b[lane] > max[lane] { b[lane] } else { max[lane] };
    }
    max
}

/// The sum of all lanes by repeated halving.
#[inline(always)]
pub(super) fn sum_of_lanes(mut lanes: Lanes) -> f32 {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

/// The largest lane, as [`sum_of_lanes`].
#[inline(always)]
pub(super) fn max_of_lanes(mut lanes: Lanes) -> f32 {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            let (a, b) = (lanes[lane], lanes[lane + width]);
            lanes[lane] = if b > a { b } else { a };
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    simd_kernel! {
        fn exp_all<S>(values: &mut [f32]) {
            for value in values.iter_mut() {
                *value = exp::<S>(*value);
            }
        }
    }

    simd_kernel! {
        fn dot_of<S>(a: &[f32], b: &[f32]) -> f32 {
            dot::<S>(a, b)
        }
    }

    simd_kernel! {
        fn dot3_of<S>(a: &[f32], b: &[f32], c: &[f32]) -> f32 {
            dot3::<S>(a, b, c)
        }
    }

    #[test]
    fn exp_stays_within_2e_7_of_libm_over_its_normal_range() {
        at_every_level(|level| {
            let inputs: Vec<f32> = (0..2_000_000).map(|i| -87.3 + 176.0 * (i as f32) / 2e6).collect();
            let mut outputs = inputs.clone();
            exp_all(&mut outputs);
            let mut worst = 0.0f64;
            for (x, y) in inputs.iter().zip(&outputs) {
                let expected = f64::from(*x).exp();
                worst = worst.max((f64::from(*y) - expected).abs() / expected);
            }
            assert!(worst <= 2e-7, "{level:?}: relative error {worst:e}");
        });
    }

    #[test]
    fn exp_handles_infinities_nan_zero_and_underflow() {
        at_every_level(|level| {
            let mut values = [
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::NAN,
                0.0,
                -0.0,
                1e30,
                -1e30,
                88.722_83,
                88.73,
                -104.5,
                -100.0,
                f32::MIN_POSITIVE,
            ];
            exp_all(&mut values);
            let [inf, neg_inf, nan, zero, neg_zero, huge, neg_huge, largest, above, below, subnormal, tiny] =
                values;
            assert_eq!((inf, huge, above), (f32::INFINITY, f32::INFINITY, f32::INFINITY), "{level:?}");
            assert_eq!((neg_inf, neg_huge, below), (0.0, 0.0, 0.0), "{level:?}");
            assert!(nan.is_nan(), "{level:?}");
            assert_eq!((zero, neg_zero, tiny), (1.0, 1.0, 1.0), "{level:?}");
            assert!(largest.is_finite() && largest > 3.4e38, "{level:?}: {largest}");
            let expected = (-100f64).exp();
            assert!((f64::from(subnormal) - expected).abs() < 2e-45, "{level:?}: {subnormal:e}");
        });
    }

    #[test]
    fn dots_sum_every_element_once_at_any_length() {
        // Small integers: every product and sum is exact, so any order gives the same bits.
        at_every_level(|level| {
            for len in [0, 1, 7, 31, 32, 33, 100, 131] {
                let a: Vec<f32> = (0..len).map(|i| (i % 5) as f32 - 2.0).collect();
                let b: Vec<f32> = (0..len).map(|i| (i % 7) as f32 - 1.0).collect();
                let c: Vec<f32> = (0..len).map(|i| (i % 3) as f32 + 1.0).collect();
                let two: f32 = (0..len).map(|i| a[i] * b[i]).sum();
                let three: f32 = (0..len).map(|i| a[i] * b[i] * c[i]).sum();
                assert_eq!(dot_of(&a, &b), two, "{level:?}, {len} elements");
                assert_eq!(dot3_of(&a, &b, &c), three, "{level:?}, {len} elements");
            }
        });
    }
}
