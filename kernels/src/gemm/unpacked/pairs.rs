//! Matmuls of bf16 pairs: each word of an operand holds two terms, the first in its low half.

use super::{CheckedMatmul, Matmul, MulAdd, all_columns};
#[cfg(target_arch = "x86_64")]
use crate::simd::Level;
use pulp::Scalar;
#[cfg(target_arch = "x86_64")]
use pulp::x86::V4;

/// As [`multiply`](super::multiply), for operands with two bf16 terms per element. Uses AVX512-BF16
/// (`VDPBF16PS`), or plain instructions, which are slow.
///
/// # Safety
/// As for [`multiply`](super::multiply).
pub(crate) unsafe fn multiply_pairs(matmul: Matmul<u32>) {
    let Matmul { rows, cols, terms, dst, dst_stride, lhs, lhs_strides, rhs, rhs_stride, factor, add } =
        matmul;
    // Both have the size and alignment of f32, and are only copied between memory and registers as such.
    let (lhs, rhs) = (lhs.cast(), rhs.cast());
    let matmul = CheckedMatmul(Matmul {
        rows,
        cols,
        terms,
        dst,
        dst_stride,
        lhs,
        lhs_strides,
        rhs,
        rhs_stride,
        factor,
        add,
    });
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = instructions_to_use() {
        // SAFETY: the CPU has these instructions, as just checked.
        return unsafe { by_instruction(simd, matmul) };
    }
    all_columns(Scalar, matmul, Halves);
}

/// AVX-512 on a CPU that also has AVX512-BF16.
#[cfg(target_arch = "x86_64")]
pub(in crate::gemm) fn instructions() -> Option<V4> {
    if std::is_x86_feature_detected!("avx512bf16") { V4::try_new() } else { None }
}

/// The same, unless a test selects a lower level.
#[cfg(target_arch = "x86_64")]
pub(super) fn instructions_to_use() -> Option<V4> {
    if Level::current() >= Level::Avx512 { instructions() } else { None }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn by_instruction(simd: V4, matmul: CheckedMatmul) {
    all_columns(simd, matmul, Instruction(()));
}

/// `VDPBF16PS`, on CPUs that have it.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Instruction(());

#[cfg(target_arch = "x86_64")]
impl MulAdd<V4> for Instruction {
    #[inline(always)]
    fn mul_add(self, _: V4, lhs: pulp::f32x16, rhs: pulp::f32x16, sum: pulp::f32x16) -> pulp::f32x16 {
        use std::arch::x86_64::{__m512, __m512bh, _mm512_dpbf16_ps};
        use std::mem::transmute;
        type F32s = pulp::f32x16;
        // Not by `map` of an array: it is a call per product where it is in another codegen unit.
        // SAFETY: all of these are 512 bits without invalid values, and only `by_instruction` makes an `Instruction`.
        unsafe {
            let (lhs, rhs) = (transmute::<F32s, __m512bh>(lhs), transmute::<F32s, __m512bh>(rhs));
            transmute::<__m512, F32s>(_mm512_dpbf16_ps(transmute::<F32s, __m512>(sum), lhs, rhs))
        }
    }
}

/// One term after another.
#[derive(Clone, Copy)]
struct Halves;

impl MulAdd<Scalar> for Halves {
    #[inline(always)]
    fn mul_add(self, _: Scalar, lhs: f32, rhs: f32, sum: f32) -> f32 {
        let halves = |word: f32| [word.to_bits() << 16, word.to_bits() & 0xffff_0000].map(f32::from_bits);
        let ([first, second], [with_first, with_second]) = (halves(lhs), halves(rhs));
        sum + first * with_first + second * with_second
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::tile::word_of;
    use crate::simd::{Level, at_every_level};
    use half::bf16;

    const UNTOUCHED: f32 = -7.0;

    /// Integers that encode the position of a term and fit bf16 exactly.
    fn term(line: usize, term: usize) -> f32 {
        ((line * 31 + term * 7) % 61) as f32 - 30.0
    }

    /// `term(line, 2 * pair)` and the next one.
    fn word(line: usize, pair: usize) -> u32 {
        let [low, high] = [2 * pair, 2 * pair + 1].map(|at| bf16::from_f32(term(line, at)).to_bits());
        word_of(low, high)
    }

    fn check([rows, cols, pairs]: [usize; 3], lhs_is_transposed: bool, add: bool, level: Level) {
        let stride = cols + 3;
        let lhs_strides = if lhs_is_transposed { [1, rows] } else { [pairs, 1] };
        let mut lhs = vec![0; rows * pairs];
        for (row, pair) in (0..rows).flat_map(|row| (0..pairs).map(move |pair| (row, pair))) {
            lhs[row * lhs_strides[0] + pair * lhs_strides[1]] = word(row, pair);
        }
        let rhs: Vec<u32> = (0..pairs * stride).map(|at| word(5 + at % stride, at / stride)).collect();
        let mut dst = vec![UNTOUCHED; rows * stride];
        let matmul = Matmul {
            rows,
            cols,
            terms: pairs,
            dst: dst.as_mut_ptr(),
            dst_stride: stride,
            lhs: lhs.as_ptr(),
            lhs_strides,
            rhs: rhs.as_ptr(),
            rhs_stride: stride,
            factor: 0.5,
            add,
        };
        // SAFETY: all three have as many elements as their shapes and strides say.
        unsafe { multiply_pairs(matmul) };
        for (index, element) in dst.into_iter().enumerate() {
            let (row, col) = (index / stride, index % stride);
            let sum: f32 = (0..2 * pairs).map(|at| term(row, at) * term(5 + col, at)).sum();
            let before = if add { UNTOUCHED } else { 0.0 };
            let expected = if col < cols { 0.5 * sum + before } else { UNTOUCHED };
            let label = format!("{rows} x {cols} x {pairs}, {lhs_is_transposed}, {add}, {level:?}");
            assert_eq!(element, expected, "{label}: {row}, {col}");
        }
    }

    #[test]
    fn both_terms_of_every_pair_are_multiplied_whatever_the_remainders() {
        at_every_level(|level| {
            for rows in 1..=26 {
                for cols in 1..=66 {
                    check([rows, cols, 3], rows % 2 == 0, cols % 2 == 0, level);
                }
            }
            for pairs in [0, 1, 16, 129] {
                check([24, 64, pairs], false, true, level);
                check([25, 33, pairs], true, false, level);
            }
        });
    }
}
