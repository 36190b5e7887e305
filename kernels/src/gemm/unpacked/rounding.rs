//! Rounds f32 to words of two bf16, the first in the low half: the operands of pairwise matmuls.

#[cfg(target_arch = "x86_64")]
use super::pairs::instructions_to_use;
use crate::gemm::tile::word_of;
use crate::simd::simd_kernel;
use half::bf16;

/// The rows of a matrix, whose starts are `stride` elements apart.
pub(crate) struct StridedRows<E> {
    pub(crate) elements: E,
    pub(crate) stride: usize,
}

/// Rounds each two adjacent values of a row to a word; an odd last value is paired with zero.
///
/// With AVX512-BF16, subnormal values become zero, as its multiplications treat them.
///
/// # Shapes
/// `[rows, cols]` values to `[rows, cols / 2]` words, with rows as far apart as the strides.
pub(crate) fn round_neighbors(
    values: StridedRows<&[f32]>,
    sizes: [usize; 2],
    words: StridedRows<&mut [u32]>,
) {
    #[cfg(target_arch = "x86_64")]
    if instructions_to_use().is_some() {
        // SAFETY: the CPU has the instructions, as just checked.
        return unsafe { instruction::round_neighbors(values, sizes, words) };
    }
    neighbors(values, sizes, words);
}

/// Rounds each value and the one below it to a word; an odd last row is paired with zero.
///
/// Subnormal values as in [`round_neighbors`].
///
/// # Shapes
/// `[rows, cols]` values to `[rows / 2, cols]` words, with rows as far apart as the strides.
pub(crate) fn round_rows(values: StridedRows<&[f32]>, sizes: [usize; 2], words: StridedRows<&mut [u32]>) {
    #[cfg(target_arch = "x86_64")]
    if instructions_to_use().is_some() {
        // SAFETY: the CPU has the instructions, as just checked.
        return unsafe { instruction::round_rows(values, sizes, words) };
    }
    two_rows(values, sizes, words);
}

simd_kernel! {
    fn neighbors<S>(values: StridedRows<&[f32]>, sizes: [usize; 2], words: StridedRows<&mut [u32]>) {
        let [rows, cols] = sizes;
        for (row, words) in words.elements.chunks_mut(words.stride).take(rows).enumerate() {
            let (pairs, rest) = values.elements[row * values.stride..][..cols].as_chunks::<2>();
            for (word, [low, high]) in words.iter_mut().zip(pairs) {
                *word = word_of(rounded(*low), rounded(*high));
            }
            for value in rest {
                words[pairs.len()] = word_of(rounded(*value), 0);
            }
        }
    }
}

simd_kernel! {
    fn two_rows<S>(values: StridedRows<&[f32]>, sizes: [usize; 2], words: StridedRows<&mut [u32]>) {
        let [rows, cols] = sizes;
        for (row, words) in (0..rows).step_by(2).zip(words.elements.chunks_mut(words.stride)) {
            let above = &values.elements[row * values.stride..][..cols];
            for (word, low) in words.iter_mut().zip(above) {
                *word = word_of(rounded(*low), 0);
            }
            if row + 1 < rows {
                let below = &values.elements[(row + 1) * values.stride..][..cols];
                for (word, high) in words.iter_mut().zip(below) {
                    *word |= word_of(0, rounded(*high));
                }
            }
        }
    }
}

#[inline(always)]
fn rounded(value: f32) -> u16 {
    bf16::from_f32(value).to_bits()
}

/// `VCVTNE2PS2BF16` and `VCVTNEPS2BF16`. Missing values count as zero.
#[cfg(target_arch = "x86_64")]
mod instruction {
    use super::StridedRows;
    use std::arch::x86_64::*;

    const LANES: usize = 16;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(super) fn round_neighbors(
        values: StridedRows<&[f32]>,
        [rows, cols]: [usize; 2],
        words: StridedRows<&mut [u32]>,
    ) {
        for (row, words) in words.elements.chunks_mut(words.stride).take(rows).enumerate() {
            let values = values.elements[row * values.stride..][..cols].chunks(2 * LANES);
            for (values, words) in values.zip(words[..cols.div_ceil(2)].chunks_mut(LANES)) {
                let (low, high) = values.split_at(LANES.min(values.len()));
                let rounded = _mm512_cvtne2ps_pbh(load(high), load(low));
                // SAFETY: both are 512 bits without invalid values.
                store(unsafe { std::mem::transmute::<__m512bh, __m512i>(rounded) }, words);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(super) fn round_rows(
        values: StridedRows<&[f32]>,
        [rows, cols]: [usize; 2],
        words: StridedRows<&mut [u32]>,
    ) {
        for (row, words) in (0..rows).step_by(2).zip(words.elements.chunks_mut(words.stride)) {
            let above = &values.elements[row * values.stride..][..cols];
            let below =
                if row + 1 < rows { &values.elements[(row + 1) * values.stride..][..cols] } else { &[] };
            for (first, words) in (0..cols).step_by(LANES).zip(words[..cols].chunks_mut(LANES)) {
                let part = |row: &[f32]| load(row.get(first..first + words.len()).unwrap_or(&[]));
                let (low, high) = (rounded(part(above)), rounded(part(below)));
                store(_mm512_or_si512(low, _mm512_slli_epi32::<16>(high)), words);
            }
        }
    }

    /// Rounds to bf16, each in the low half of a word.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn rounded(values: __m512) -> __m512i {
        // SAFETY: both are 256 bits without invalid values.
        let rounded = unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values)) };
        _mm512_cvtepu16_epi32(rounded)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(values: &[f32]) -> __m512 {
        // SAFETY: reads no further than the slice.
        unsafe { _mm512_maskz_loadu_ps(mask(values.len()), values.as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store(vector: __m512i, words: &mut [u32]) {
        // SAFETY: writes no further than the slice.
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
    use crate::simd::at_every_level;

    const UNTOUCHED: u32 = 0xdead_beef;

    /// Halfway between two bf16 values, and slightly to either side.
    fn value(at: usize) -> f32 {
        f32::from_bits(0x3f80_8000 + ((at as u32 % 97) << 16) + at as u32 % 3 - 1) * [1.0, -1.0][at % 2]
    }

    #[test]
    fn every_value_is_rounded_to_even_at_its_place_whatever_the_sizes() {
        at_every_level(|level| {
            for (rows, cols) in
                [1, 2, 5, 8].into_iter().flat_map(|rows| (1..=70).map(move |cols| (rows, cols)))
            {
                let (stride, words_stride) = (cols + 5, cols + 3);
                let values: Vec<f32> = (0..rows * stride).map(value).collect();
                let bits = |row: usize, col: usize| {
                    if row < rows && col < cols {
                        bf16::from_f32(value(row * stride + col)).to_bits()
                    } else {
                        0
                    }
                };
                let mut neighbors = vec![UNTOUCHED; rows * words_stride];
                let rows_of_values = || StridedRows { elements: &values[..], stride };
                let words = StridedRows { elements: &mut neighbors[..], stride: words_stride };
                round_neighbors(rows_of_values(), [rows, cols], words);
                let mut two_rows = vec![UNTOUCHED; rows.div_ceil(2) * words_stride];
                let words = StridedRows { elements: &mut two_rows[..], stride: words_stride };
                round_rows(rows_of_values(), [rows, cols], words);
                for (at, word) in neighbors.into_iter().enumerate() {
                    let (row, pair) = (at / words_stride, at % words_stride);
                    let expected = word_of(bits(row, 2 * pair), bits(row, 2 * pair + 1));
                    let expected = if pair < cols.div_ceil(2) { expected } else { UNTOUCHED };
                    assert_eq!(word, expected, "{level:?}, {rows} x {cols}: {row}, pair {pair}");
                }
                for (at, word) in two_rows.into_iter().enumerate() {
                    let (pair, col) = (at / words_stride, at % words_stride);
                    let expected = word_of(bits(2 * pair, col), bits(2 * pair + 1, col));
                    let expected = if col < cols { expected } else { UNTOUCHED };
                    assert_eq!(word, expected, "{level:?}, {rows} x {cols}: pair {pair}, {col}");
                }
            }
        });
    }

    #[test]
    fn nan_stays_nan_when_rounded() {
        at_every_level(|level| {
            let values = [f32::NAN, f32::INFINITY, f32::from_bits(0x7f80_0001), 1.0];
            let mut words = [0; 4];
            let both = [values, values].concat();
            let target = StridedRows { elements: &mut words[..], stride: 4 };
            round_rows(StridedRows { elements: &both, stride: 4 }, [2, 4], target);
            let mut pairs = [0; 2];
            let target = StridedRows { elements: &mut pairs[..], stride: 2 };
            round_neighbors(StridedRows { elements: &values, stride: 4 }, [1, 4], target);
            for (at, value) in values.into_iter().enumerate() {
                let half = |word: u32, at: usize| bf16::from_bits((word >> (16 * at)) as u16);
                for got in [half(words[at], 0), half(words[at], 1), half(pairs[at / 2], at % 2)] {
                    let (got, expected) = [got.to_f32(), value].map(|x| (x.is_nan(), x.is_infinite())).into();
                    assert_eq!(got, expected, "{level:?}");
                }
            }
        });
    }
}
