//! Reductions and buffer arithmetic on slices.

use crate::cast::{Before, PIECE, Pieces};
use crate::parallel::{MIN_BLOCK_ELEMS, rows_per_block};
use crate::simd::{self, simd_kernel};
use rayon::prelude::*;

pub(super) fn sum_of_squares<T: Pieces>(x: &[T]) -> f64 {
    // Fixed blocks, summed in order: the number of threads decides only which thread computes which block.
    let blocks = x.par_chunks(MIN_BLOCK_ELEMS);
    let sums = blocks.map_init(Vec::new, |buffer, block| sum_of_squares_block(T::read(block, buffer)));
    sums.collect::<Vec<f64>>().iter().sum()
}

simd_kernel! {
    fn sum_of_squares_block<S>(x: &[f32]) -> f64 {
        simd::sum_of_squares(x)
    }
}

pub(super) fn all_finite<T: Pieces>(x: &[T]) -> bool {
    let blocks = x.par_chunks(MIN_BLOCK_ELEMS);
    blocks.map_init(Vec::new, |buffer, block| all_finite_block(T::read(block, buffer))).all(|finite| finite)
}

simd_kernel! {
    fn all_finite_block<S>(x: &[f32]) -> bool {
        // Infinities and NaN have all exponent bits set. No early exit, so that the loop vectorizes.
        let mut largest = 0;
        for value in x {
            largest = largest.max(value.to_bits() << 1);
        }
        largest < f32::INFINITY.to_bits() << 1
    }
}

pub(super) fn accumulate<D: Pieces, S: Pieces>(dst: &mut [D], src: &[S]) {
    let block = rows_per_block(dst.len(), 1);
    let blocks = (dst.par_chunks_mut(block), src.par_chunks(block)).into_par_iter();
    blocks.for_each_init(Default::default, |[a, b]: &mut [Vec<f32>; 2], (dst, src)| {
        for (dst, src) in dst.chunks_mut(PIECE).zip(src.chunks(PIECE)) {
            let src = S::read(src, a);
            D::update(dst, Before::Values, b, |dst| accumulate_piece(dst, src));
        }
    });
}

simd_kernel! {
    fn accumulate_piece<S>(dst: &mut [f32], src: &[f32]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst += src;
        }
    }
}

pub(super) fn scale<T: Pieces>(dst: &mut [T], factor: f32) {
    let block = rows_per_block(dst.len(), 1);
    dst.par_chunks_mut(block).for_each_init(Vec::new, |buffer, dst| {
        for dst in dst.chunks_mut(PIECE) {
            T::update(dst, Before::Values, buffer, |dst| scale_piece(dst, factor));
        }
    });
}

simd_kernel! {
    fn scale_piece<S>(dst: &mut [f32], factor: f32) {
        for dst in dst.iter_mut() {
            *dst *= factor;
        }
    }
}

pub(super) fn softcap<T: Pieces>(dst: &mut [T], cap: f32) {
    let block = rows_per_block(dst.len(), 1);
    dst.par_chunks_mut(block).for_each_init(Vec::new, |buffer, dst| {
        for dst in dst.chunks_mut(PIECE) {
            T::update(dst, Before::Values, buffer, |dst| softcap_piece(dst, cap));
        }
    });
}

simd_kernel! {
    fn softcap_piece<S>(dst: &mut [f32], cap: f32) {
        for dst in dst.iter_mut() {
            *dst = crate::softcap::softcap::<S>(*dst, cap);
        }
    }
}

pub(super) fn fill<T: Pieces>(dst: &mut [T], value: f32) {
    let block = rows_per_block(dst.len(), 1);
    let mut element = [T::zero()];
    T::round(&[value], &mut element);
    dst.par_chunks_mut(block).for_each(|dst| dst.fill(element[0]));
}
