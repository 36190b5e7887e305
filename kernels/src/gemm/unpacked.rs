//! Matmuls of matrices in the cache, without packing, with f32 sums.
//!
//! A general matmul packs its operands first. For the tiles of attention, which sum over 32 to 256 terms,
//! packing costs as much time as it saves. Here rows of `rhs` are loaded as vectors and elements of `lhs` are
//! broadcast. Elements are f32, or pairs of bf16 ([`multiply_pairs`]).

mod pairs;
mod rounding;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub(super) use pairs::instructions as instructions_for_pairs;
pub(crate) use pairs::multiply_pairs;
pub(crate) use rounding::{StridedRows, round_neighbors, round_rows};

use crate::simd::Level;
use pulp::{MemMask, Simd, WithSimd};
use std::hint::black_box;

/// `dst = factor * lhs * rhs`, or added to `dst`. `W` is the element type of the operands.
///
/// # Shapes
/// `dst` `[rows, cols]` and `rhs` `[terms, cols]` have contiguous rows; `lhs` `[rows, terms]` has any strides.
#[derive(Clone, Copy)]
pub(crate) struct Matmul<W = f32> {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) terms: usize,
    pub(crate) dst: *mut f32,
    pub(crate) dst_stride: usize,
    pub(crate) lhs: *const W,
    /// Strides between rows, and between terms.
    pub(crate) lhs_strides: [usize; 2],
    pub(crate) rhs: *const W,
    pub(crate) rhs_stride: usize,
    pub(crate) factor: f32,
    pub(crate) add: bool,
}

/// Computes the matmul on the calling thread.
///
/// # Safety
/// All elements of the matrices are in bounds of the memory that the pointers point into, and no other code
/// accesses those of `dst`.
pub(crate) unsafe fn multiply(matmul: Matmul) {
    let matmul = CheckedMatmul(matmul);
    let level = Level::current();
    #[cfg(target_arch = "x86_64")]
    {
        use pulp::x86::{V3, V4};
        if level >= Level::Avx512
            && let Some(simd) = V4::try_new()
        {
            return Simd::vectorize(simd, matmul);
        }
        if level >= Level::Avx2
            && let Some(simd) = V3::try_new()
        {
            return Simd::vectorize(simd, matmul);
        }
    }
    #[cfg(target_arch = "aarch64")]
    if let Some(simd) = pulp::aarch64::Neon::try_new() {
        return Simd::vectorize(simd, matmul);
    }
    let _ = level;
    // Without vectors, as in the `gemm` crate: SSE2 has no fused multiply-add.
    Simd::vectorize(pulp::Scalar, matmul);
}

/// A matmul whose pointers are valid by the contract of [`multiply`].
struct CheckedMatmul(Matmul);

impl WithSimd for CheckedMatmul {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        all_columns(simd, self, Elements);
    }
}

/// A multiply-add of vectors of the operands' elements, which have the size of f32.
trait MulAdd<S: Simd>: Copy {
    fn mul_add(self, simd: S, lhs: S::f32s, rhs: S::f32s, sum: S::f32s) -> S::f32s;
}

/// Elements of f32.
#[derive(Clone, Copy)]
struct Elements;

impl<S: Simd> MulAdd<S> for Elements {
    #[inline(always)]
    fn mul_add(self, simd: S, lhs: S::f32s, rhs: S::f32s, sum: S::f32s) -> S::f32s {
        simd.mul_add_e_f32s(lhs, rhs, sum)
    }
}

/// Computes the matmul.
#[inline(always)]
fn all_columns<S: Simd, M: MulAdd<S>>(simd: S, CheckedMatmul(matmul): CheckedMatmul, elements: M) {
    // Three quarters of the registers hold sums, the rest operands.
    let most_vectors = if S::REGISTER_COUNT >= 32 { 4 } else { 2 };
    let mut col = 0;
    while col < matmul.cols {
        let vectors = (matmul.cols - col).div_ceil(S::F32_LANES).min(most_vectors);
        let columns = Columns::new(simd, matmul, elements, col, vectors);
        if S::REGISTER_COUNT >= 32 {
            match vectors {
                1 => columns.multiply::<1, 12>(),
                2 => columns.multiply::<2, 12>(),
                3 => columns.multiply::<3, 8>(),
                _ => columns.multiply::<4, 6>(),
            }
        } else {
            match vectors {
                1 => columns.multiply::<1, 8>(),
                _ => columns.multiply::<2, 4>(),
            }
        }
        col += vectors * S::F32_LANES;
    }
}

/// Some columns of a [`CheckedMatmul`]; the last vector may be partial.
struct Columns<S: Simd, M> {
    simd: S,
    matmul: Matmul,
    elements: M,
    first: usize,
    /// Mask of the last vector.
    mask: MemMask<S::m32s>,
    /// Whether the last vector is partial.
    is_partial: bool,
}

impl<S: Simd, M: MulAdd<S>> Columns<S, M> {
    #[inline(always)]
    fn new(simd: S, matmul: Matmul, elements: M, first: usize, vectors: usize) -> Self {
        let last = (matmul.cols - first).saturating_sub((vectors - 1) * S::F32_LANES);
        let mask = simd.mask_between_m32s(0, last as u32);
        Self { simd, matmul, elements, first, mask, is_partial: last < S::F32_LANES }
    }

    #[inline(always)]
    fn multiply<const VECTORS: usize, const ROWS: usize>(&self) {
        let mut row = 0;
        while self.matmul.rows - row >= ROWS {
            self.tile::<VECTORS, ROWS>(row);
            row += ROWS;
        }
        while self.matmul.rows - row >= 4 {
            self.tile::<VECTORS, 4>(row);
            row += 4;
        }
        while self.matmul.rows > row {
            self.tile::<VECTORS, 1>(row);
            row += 1;
        }
    }

    #[inline(always)]
    fn tile<const VECTORS: usize, const ROWS: usize>(&self, row: usize) {
        if self.is_partial {
            self.store::<VECTORS, ROWS, true>(row, self.sums::<VECTORS, ROWS, true>(row));
        } else {
            self.store::<VECTORS, ROWS, false>(row, self.sums::<VECTORS, ROWS, false>(row));
        }
    }

    #[inline(always)]
    fn sums<const VECTORS: usize, const ROWS: usize, const PARTIAL: bool>(
        &self,
        row: usize,
    ) -> [[S::f32s; VECTORS]; ROWS] {
        let Self { simd, matmul, elements, first, .. } = *self;
        let [row_stride, term_stride] = matmul.lhs_strides;
        let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
        let mut lhs = matmul.lhs.wrapping_add(row * row_stride);
        let mut rhs = matmul.rhs.wrapping_add(first);
        // Hidden from the compiler, which would otherwise compute each offset from the previous one: a chain
        // of additions that takes as long as the multiplications.
        let offsets: [usize; ROWS] = black_box(std::array::from_fn(|index| index * row_stride));
        for _ in 0..matmul.terms {
            let mut b = [simd.splat_f32s(0.0); VECTORS];
            for (index, b) in b.iter_mut().enumerate() {
                let is_partial = PARTIAL && index + 1 == VECTORS;
                // SAFETY: by the contract of `multiply` these are elements of `rhs`; the mask hides what lies
                // beyond the last column.
                *b = unsafe { self.load(is_partial, rhs.wrapping_add(index * S::F32_LANES)) };
            }
            for (sums, offset) in sums.iter_mut().zip(offsets) {
                // SAFETY: as above, of `lhs`.
                let a = simd.splat_f32s(unsafe { *lhs.wrapping_add(offset) });
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum = elements.mul_add(simd, a, b, *sum);
                }
            }
            (lhs, rhs) = (lhs.wrapping_add(term_stride), rhs.wrapping_add(matmul.rhs_stride));
        }
        sums
    }

    #[inline(always)]
    fn store<const VECTORS: usize, const ROWS: usize, const PARTIAL: bool>(
        &self,
        row: usize,
        sums: [[S::f32s; VECTORS]; ROWS],
    ) {
        let Self { simd, matmul, first, mask, .. } = *self;
        let factor = simd.splat_f32s(matmul.factor);
        for (row, sums) in (row..).zip(sums) {
            let dst = matmul.dst.wrapping_add(row * matmul.dst_stride + first);
            for (index, sum) in sums.into_iter().enumerate() {
                let is_partial = PARTIAL && index + 1 == VECTORS;
                let dst = dst.wrapping_add(index * S::F32_LANES);
                // SAFETY: by the contract of `multiply` these are elements of `dst`; the mask hides what lies
                // beyond the last column.
                unsafe {
                    let value = if matmul.add {
                        simd.mul_add_e_f32s(factor, sum, self.load(is_partial, dst))
                    } else {
                        simd.mul_f32s(factor, sum)
                    };
                    if is_partial {
                        simd.mask_store_ptr_f32s(mask, dst, value);
                    } else {
                        dst.cast::<S::f32s>().write_unaligned(value);
                    }
                }
            }
        }
    }

    /// # Safety
    /// The elements that the mask shows, or a whole vector if not partial, can be read.
    #[inline(always)]
    unsafe fn load(&self, is_partial: bool, from: *const f32) -> S::f32s {
        // SAFETY: by this function's contract.
        unsafe {
            if is_partial {
                self.simd.mask_load_ptr_f32s(self.mask, from)
            } else {
                from.cast::<S::f32s>().read_unaligned()
            }
        }
    }
}
