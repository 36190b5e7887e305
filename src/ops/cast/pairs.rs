//! Rounding to words that hold two bf16, the first in the low half: the operands of products by pairs.

use crate::ops::gemm::tile::word_of;
use crate::ops::simd::{Level, simd_kernel};
use half::bf16;

/// Each two neighbours become a word; the last one alone has zero beside it.
///
/// With AVX512-BF16 subnormal values become zero, as they count for its products.
pub(in crate::ops) fn round_neighbours(values: &[f32], words: &mut [u32]) {
    let words = &mut words[..values.len().div_ceil(2)];
    #[cfg(target_arch = "x86_64")]
    if has_instruction() {
        // SAFETY: as just asked.
        return unsafe { instruction::round_neighbours(values, words) };
    }
    neighbours(values, words);
}

/// Each value of `first` becomes a word with that of `second`, of which there are as many, or with zero.
///
/// With AVX512-BF16 subnormal values become zero, as they count for its products.
pub(in crate::ops) fn round_rows(first: &[f32], second: Option<&[f32]>, words: &mut [u32]) {
    let words = &mut words[..first.len()];
    let Some(second) = second else {
        return with_zeros(first, words);
    };
    #[cfg(target_arch = "x86_64")]
    if has_instruction() {
        // SAFETY: as just asked.
        return unsafe { instruction::round_rows(first, second, words) };
    }
    both_rows(first, second, words);
}

#[cfg(target_arch = "x86_64")]
fn has_instruction() -> bool {
    Level::current() >= Level::Avx512 && std::is_x86_feature_detected!("avx512bf16")
}

simd_kernel! {
    fn neighbours<S>(values: &[f32], words: &mut [u32]) {
        let (pairs, rest) = values.as_chunks::<2>();
        for (word, [low, high]) in words.iter_mut().zip(pairs) {
            *word = word_of(rounded(*low), rounded(*high));
        }
        for value in rest {
            words[pairs.len()] = word_of(rounded(*value), 0);
        }
    }
}

simd_kernel! {
    fn both_rows<S>(first: &[f32], second: &[f32], words: &mut [u32]) {
        for ((word, low), high) in words.iter_mut().zip(first).zip(second) {
            *word = word_of(rounded(*low), rounded(*high));
        }
    }
}

simd_kernel! {
    fn with_zeros<S>(first: &[f32], words: &mut [u32]) {
        for (word, low) in words.iter_mut().zip(first) {
            *word = word_of(rounded(*low), 0);
        }
    }
}

#[inline(always)]
fn rounded(value: f32) -> u16 {
    bf16::from_f32(value).to_bits()
}

/// `VCVTNE2PS2BF16` and `VCVTNEPS2BF16`. Of a row's end, values that are not there count as zero.
#[cfg(target_arch = "x86_64")]
mod instruction {
    use std::arch::x86_64::*;

    const LANES: usize = 16;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(super) fn round_neighbours(values: &[f32], words: &mut [u32]) {
        for (values, words) in values.chunks(2 * LANES).zip(words.chunks_mut(LANES)) {
            let (low, high) = values.split_at(LANES.min(values.len()));
            let rounded = _mm512_cvtne2ps_pbh(load(high), load(low));
            // SAFETY: both are 512 bits without invalid values.
            store(unsafe { std::mem::transmute::<__m512bh, __m512i>(rounded) }, words);
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(super) fn round_rows(first: &[f32], second: &[f32], words: &mut [u32]) {
        let rows = first.chunks(LANES).zip(second.chunks(LANES));
        for ((first, second), words) in rows.zip(words.chunks_mut(LANES)) {
            let halves = [first, second].map(|values| {
                let rounded = _mm512_cvtneps_pbh(load(values));
                // SAFETY: both are 256 bits without invalid values.
                _mm512_cvtepu16_epi32(unsafe { std::mem::transmute::<__m256bh, __m256i>(rounded) })
            });
            store(_mm512_or_si512(halves[0], _mm512_slli_epi32::<16>(halves[1])), words);
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(values: &[f32]) -> __m512 {
        // SAFETY: reads no more than the slice has.
        unsafe { _mm512_maskz_loadu_ps(mask(values.len()), values.as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store(vector: __m512i, words: &mut [u32]) {
        // SAFETY: writes no more than the slice has.
        unsafe { _mm512_mask_storeu_epi32(words.as_mut_ptr().cast(), mask(words.len()), vector) }
    }

    /// The first `len` of 16 lanes.
    #[inline]
    fn mask(len: usize) -> __mmask16 {
        ((1_u32 << len) - 1) as __mmask16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::simd::at_every_level;

    #[test]
    fn every_value_is_rounded_to_even_at_its_place_whatever_the_length() {
        // Halfway between two bf16 numbers, and a little to either side.
        let value = |at: usize| {
            f32::from_bits(0x3f80_8000 + ((at as u32 % 97) << 16) + (at as u32 % 3) - 1) * [1.0, -1.0][at % 2]
        };
        let bits = |at: usize| bf16::from_f32(value(at)).to_bits();
        const UNTOUCHED: u32 = 0xdead_beef;
        at_every_level(|level| {
            for len in 0..=70 {
                let values: Vec<f32> = (0..2 * len).map(value).collect();
                let (first, second) = values.split_at(len);
                let mut words = vec![UNTOUCHED; len + 1];
                round_rows(first, Some(second), &mut words);
                for (at, word) in words[..len].iter().enumerate() {
                    assert_eq!(*word, word_of(bits(at), bits(len + at)), "{level:?}: {at} of {len}");
                }
                round_rows(first, None, &mut words);
                for (at, word) in words[..len].iter().enumerate() {
                    assert_eq!(*word, word_of(bits(at), 0), "{level:?}: {at} of {len} alone");
                }
                assert_eq!(words[len], UNTOUCHED, "{level:?}: {len}");
                let mut words = vec![UNTOUCHED; len.div_ceil(2) + 1];
                round_neighbours(first, &mut words);
                for (at, word) in words[..len.div_ceil(2)].iter().enumerate() {
                    let high = if 2 * at + 1 < len { bits(2 * at + 1) } else { 0 };
                    assert_eq!(*word, word_of(bits(2 * at), high), "{level:?}: pair {at} of {len}");
                }
                assert_eq!(words.last(), Some(&UNTOUCHED), "{level:?}: {len}");
            }
        });
    }

    #[test]
    fn what_is_no_number_stays_none() {
        at_every_level(|level| {
            let values = [f32::NAN, f32::INFINITY, f32::from_bits(0x7f80_0001), 1.0];
            let mut words = [0; 4];
            round_rows(&values, Some(&values), &mut words);
            let mut pairs = [0; 2];
            round_neighbours(&values, &mut pairs);
            for (at, value) in values.into_iter().enumerate() {
                let half = |word: u32, at: usize| bf16::from_bits((word >> (16 * at)) as u16);
                for got in [half(words[at], 0), half(words[at], 1), half(pairs[at / 2], at % 2)] {
                    assert_eq!(
                        (got.is_nan(), got.is_infinite()),
                        (value.is_nan(), value.is_infinite()),
                        "{level:?}"
                    );
                }
            }
        });
    }
}
