//! f32 products of matrices that lie in the cache, read where they are.
//!
//! A general product packs its operands first. For the tiles of attention, whose products sum over 32 to 256 terms,
//! that costs as much time as it saves: here rows of `rhs` are loaded as vectors and elements of `lhs` broadcast.

use crate::ops::simd::Level;
use pulp::{MemMask, Simd, WithSimd};
use std::hint::black_box;

/// `dst = factor * lhs * rhs`, or added to `dst`.
///
/// # Shapes
/// `dst` `[rows, cols]` and `rhs` `[terms, cols]` have contiguous rows; `lhs` `[rows, terms]` has any strides.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Product {
    pub(in crate::ops) rows: usize,
    pub(in crate::ops) cols: usize,
    pub(in crate::ops) terms: usize,
    pub(in crate::ops) dst: *mut f32,
    pub(in crate::ops) dst_stride: usize,
    pub(in crate::ops) lhs: *const f32,
    /// Between rows, and between terms.
    pub(in crate::ops) lhs_strides: [usize; 2],
    pub(in crate::ops) rhs: *const f32,
    pub(in crate::ops) rhs_stride: usize,
    pub(in crate::ops) factor: f32,
    pub(in crate::ops) add: bool,
}

/// Computes the product on the calling thread.
///
/// # Safety
/// All elements of the matrices are in bounds of what the pointers point into, and nothing else reaches those of `dst`.
pub(in crate::ops) unsafe fn multiply(product: Product) {
    let promised = Promised(product);
    let level = Level::current();
    #[cfg(target_arch = "x86_64")]
    {
        use pulp::x86::{V3, V4};
        if level >= Level::Avx512
            && let Some(simd) = V4::try_new()
        {
            return Simd::vectorize(simd, promised);
        }
        if level >= Level::Avx2
            && let Some(simd) = V3::try_new()
        {
            return Simd::vectorize(simd, promised);
        }
    }
    #[cfg(target_arch = "aarch64")]
    if let Some(simd) = pulp::aarch64::Neon::try_new() {
        return Simd::vectorize(simd, promised);
    }
    let _ = level;
    // Without vectors, as the `gemm` crate does there: those of SSE2 have no fused multiply-add.
    Simd::vectorize(pulp::Scalar, promised);
}

/// A product of which [`multiply`]'s caller has promised that its pointers may be followed.
struct Promised(Product);

impl WithSimd for Promised {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Sums take three quarters of the registers, the rest is for the operands.
        let most_vectors = if S::REGISTER_COUNT >= 32 { 4 } else { 2 };
        let mut col = 0;
        while col < self.0.cols {
            let vectors = (self.0.cols - col).div_ceil(S::F32_LANES).min(most_vectors);
            let columns = Columns::new(simd, self.0, col, vectors);
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
}

/// Some columns of a [`Promised`] product, the last vector of which may be partial.
struct Columns<S: Simd> {
    simd: S,
    product: Product,
    first: usize,
    /// Elements of the last vector.
    mask: MemMask<S::m32s>,
    /// Whether it has fewer than a vector holds.
    is_partial: bool,
}

impl<S: Simd> Columns<S> {
    #[inline(always)]
    fn new(simd: S, product: Product, first: usize, vectors: usize) -> Self {
        let last = (product.cols - first).saturating_sub((vectors - 1) * S::F32_LANES);
        let mask = simd.mask_between_m32s(0, last as u32);
        Self { simd, product, first, mask, is_partial: last < S::F32_LANES }
    }

    #[inline(always)]
    fn multiply<const VECTORS: usize, const ROWS: usize>(&self) {
        let mut row = 0;
        while self.product.rows - row >= ROWS {
            self.tile::<VECTORS, ROWS>(row);
            row += ROWS;
        }
        while self.product.rows - row >= 4 {
            self.tile::<VECTORS, 4>(row);
            row += 4;
        }
        while self.product.rows > row {
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
        let Self { simd, product, first, .. } = *self;
        let [row_stride, term_stride] = product.lhs_strides;
        let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
        let mut lhs = product.lhs.wrapping_add(row * row_stride);
        let mut rhs = product.rhs.wrapping_add(first);
        // Hidden, or the compiler reaches a row by adding the stride to the row before: a chain of additions that
        // takes as long as the multiplications.
        let offsets: [usize; ROWS] = black_box(std::array::from_fn(|index| index * row_stride));
        for _ in 0..product.terms {
            let mut b = [simd.splat_f32s(0.0); VECTORS];
            for (index, b) in b.iter_mut().enumerate() {
                let is_partial = PARTIAL && index + 1 == VECTORS;
                // SAFETY: as `multiply`'s caller promises, these are elements of `rhs`; the mask hides what lies beyond the last column.
                *b = unsafe { self.load(is_partial, rhs.wrapping_add(index * S::F32_LANES)) };
            }
            for (sums, offset) in sums.iter_mut().zip(offsets) {
                // SAFETY: as above, of `lhs`.
                let a = simd.splat_f32s(unsafe { *lhs.wrapping_add(offset) });
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum = simd.mul_add_e_f32s(a, b, *sum);
                }
            }
            (lhs, rhs) = (lhs.wrapping_add(term_stride), rhs.wrapping_add(product.rhs_stride));
        }
        sums
    }

    #[inline(always)]
    fn store<const VECTORS: usize, const ROWS: usize, const PARTIAL: bool>(
        &self,
        row: usize,
        sums: [[S::f32s; VECTORS]; ROWS],
    ) {
        let Self { simd, product, first, mask, .. } = *self;
        let factor = simd.splat_f32s(product.factor);
        for (row, sums) in (row..).zip(sums) {
            let dst = product.dst.wrapping_add(row * product.dst_stride + first);
            for (index, sum) in sums.into_iter().enumerate() {
                let is_partial = PARTIAL && index + 1 == VECTORS;
                let dst = dst.wrapping_add(index * S::F32_LANES);
                // SAFETY: as `multiply`'s caller promises, these are elements of `dst`; the mask hides what lies beyond the last column.
                unsafe {
                    let value = if product.add {
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
        // SAFETY: as the caller promises.
        unsafe {
            if is_partial {
                self.simd.mask_load_ptr_f32s(self.mask, from)
            } else {
                from.cast::<S::f32s>().read_unaligned()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::simd::at_every_level;

    const UNTOUCHED: f32 = -7.0;

    /// Integers that tell their place, so that sums are exact at every level.
    fn matrix(rows: usize, cols: usize) -> Vec<f32> {
        (0..rows * cols).map(|index| (index / cols * 31 + index % cols * 7) as f32 % 61.0 - 30.0).collect()
    }

    /// Rows of `cols` elements, `stride` apart.
    fn check(
        [rows, cols, terms]: [usize; 3],
        lhs_is_transposed: bool,
        add: bool,
        level: impl std::fmt::Debug,
    ) {
        let stride = cols + 3;
        let (lhs, rhs) = (matrix(rows, terms), matrix(terms, stride));
        let lhs_strides = if lhs_is_transposed { [1, rows] } else { [terms, 1] };
        let mut dst = vec![UNTOUCHED; rows * stride];
        let product = Product {
            rows,
            cols,
            terms,
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
        unsafe { multiply(product) };
        for (index, element) in dst.into_iter().enumerate() {
            let (row, col) = (index / stride, index % stride);
            let lhs = |term| lhs[row * lhs_strides[0] + term * lhs_strides[1]];
            let sum: f32 = (0..terms).map(|term| lhs(term) * rhs[term * stride + col]).sum();
            let before = if add { UNTOUCHED } else { 0.0 };
            let expected = if col < cols { 0.5 * sum + before } else { UNTOUCHED };
            assert_eq!(
                element, expected,
                "{rows} x {cols} x {terms}, {lhs_is_transposed}, {add}, {level:?}: {row}, {col}"
            );
        }
    }

    #[test]
    fn every_remainder_of_rows_and_columns_is_multiplied_and_nothing_else_written() {
        at_every_level(|level| {
            for rows in 1..=26 {
                for cols in 1..=66 {
                    check([rows, cols, 3], rows % 2 == 0, cols % 2 == 0, level);
                }
            }
        });
    }

    #[test]
    fn a_product_of_no_terms_is_zero_and_one_of_many_is_their_sum() {
        at_every_level(|level| {
            for terms in [0, 1, 64, 257] {
                for add in [false, true] {
                    check([24, 64, terms], false, add, level);
                    check([24, 32, terms], true, add, level);
                }
            }
            for empty in [[0, 16, 3], [5, 0, 3]] {
                check(empty, false, false, level);
            }
        });
    }
}
