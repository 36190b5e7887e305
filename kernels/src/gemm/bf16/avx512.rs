//! AVX512-BF16: the same panels, one row of pairs of A times 16 columns of B at a time.

use super::pack::{PAIRS, TILE_WORDS};
use super::{BLOCK, Sums};
use crate::gemm::unpacked::instructions_for_pairs;
use std::arch::x86_64::*;

/// Rows whose sums are in registers at the same time, for all 32 columns.
const ROWS: usize = 8;

/// Returns whether the CPU has the instructions.
pub(super) fn is_available() -> bool {
    instructions_for_pairs().is_some()
}

/// # Safety
/// [`is_available`], and all panels have `tiles` tiles.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn block(a: [&[u32]; 2], b: [&[u32]; 2], tiles: usize, sums: &mut Sums) {
    for first in (0..BLOCK).step_by(ROWS) {
        let rows = &a[first / 16][first % 16 * PAIRS..];
        let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
        // Two plain loops: for an iterator over both, the compiler keeps `acc` in memory, at a fifth of the
        // speed.
        for tile in 0..tiles {
            for pair in 0..PAIRS {
                let at = tile * TILE_WORDS + pair * 16;
                // SAFETY: a tile has 16 words for each of its pairs.
                let b = b.map(|b| unsafe { bf16_of(_mm512_loadu_si512(b.as_ptr().add(at).cast())) });
                for (row, acc) in acc.iter_mut().enumerate() {
                    // SAFETY: a tile has `PAIRS` words for each of its 16 rows.
                    let word = unsafe { *rows.as_ptr().add(tile * TILE_WORDS + row * PAIRS + pair) };
                    let a = bf16_of(_mm512_set1_epi32(word.cast_signed()));
                    acc[0] = _mm512_dpbf16_ps(acc[0], a, b[0]);
                    acc[1] = _mm512_dpbf16_ps(acc[1], a, b[1]);
                }
            }
        }
        for (sums, acc) in sums.0[first..first + ROWS].iter_mut().zip(acc) {
            let (left, right) = sums.split_at_mut(16);
            // SAFETY: both halves have 16 elements.
            unsafe {
                _mm512_storeu_ps(left.as_mut_ptr(), acc[0]);
                _mm512_storeu_ps(right.as_mut_ptr(), acc[1]);
            }
        }
    }
}

#[inline(always)]
fn bf16_of(words: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits without invalid values.
    unsafe { std::mem::transmute(words) }
}
