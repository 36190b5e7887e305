//! The conversion on slices.

use crate::parallel::rows_per_block;
use crate::simd::simd_kernel;
use crate::tensor::Element;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

/// Number of values that are converted at a time: they stay in the first-level cache.
const CHUNK: usize = 1024;

/// An element type of mixed precision.
pub(crate) trait Float: Element {
    /// Reads elements as f32.
    fn widen(elements: &[Self], values: &mut [f32]);
    /// Rounds values to elements, to nearest even.
    fn round(values: &[f32], elements: &mut [Self]);

    /// Reads `[rows, cols]` elements as f32; rows are `stride` and `into_stride` apart.
    fn widen_rows(
        elements: &[Self],
        stride: usize,
        values: &mut [f32],
        into_stride: usize,
        [rows, cols]: [usize; 2],
    ) {
        for row in 0..rows {
            Self::widen(&elements[row * stride..][..cols], &mut values[row * into_stride..][..cols]);
        }
    }

    /// The elements themselves, if they are f32.
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }

    /// As [`as_f32`](Self::as_f32), mutable.
    fn as_f32_mut(_: &mut [Self]) -> Option<&mut [f32]> {
        None
    }

    /// The elements themselves, if they are bf16.
    fn as_bf16(_: &[Self]) -> Option<&[bf16]> {
        None
    }
}

impl Float for f32 {
    fn widen(elements: &[Self], values: &mut [f32]) {
        values.copy_from_slice(elements);
    }

    fn round(values: &[f32], elements: &mut [Self]) {
        elements.copy_from_slice(values);
    }

    fn widen_rows(
        elements: &[Self],
        stride: usize,
        values: &mut [f32],
        into_stride: usize,
        sizes: [usize; 2],
    ) {
        copy_rows(elements, stride, values, into_stride, sizes);
    }

    fn as_f32(elements: &[Self]) -> Option<&[f32]> {
        Some(elements)
    }

    fn as_f32_mut(elements: &mut [Self]) -> Option<&mut [f32]> {
        Some(elements)
    }
}

impl Float for bf16 {
    fn widen(elements: &[Self], values: &mut [f32]) {
        widen_bf16(elements, values);
    }

    fn round(values: &[f32], elements: &mut [Self]) {
        round_to_bf16(values, elements);
    }

    fn widen_rows(
        elements: &[Self],
        stride: usize,
        values: &mut [f32],
        into_stride: usize,
        sizes: [usize; 2],
    ) {
        widen_bf16_rows(elements, stride, values, into_stride, sizes);
    }

    fn as_bf16(elements: &[Self]) -> Option<&[bf16]> {
        Some(elements)
    }
}

/// Copies `[rows, cols]` elements; rows are `stride` and `into_stride` apart.
#[inline(always)]
pub(crate) fn copy_rows<T: Copy>(
    elements: &[T],
    stride: usize,
    into: &mut [T],
    into_stride: usize,
    [rows, cols]: [usize; 2],
) {
    /// A constant length.
    const CHUNK: usize = 16;

    for row in 0..rows {
        let (row, copy) = (&elements[row * stride..][..cols], &mut into[row * into_stride..][..cols]);
        let ((whole, tail), (copies, copy_tail)) = (row.as_chunks::<CHUNK>(), copy.as_chunks_mut::<CHUNK>());
        for (copy, chunk) in copies.iter_mut().zip(whole) {
            *copy = *chunk;
        }
        copy_tail.copy_from_slice(tail);
    }
}

/// As `bf16::to_f32`, without its special case for NaN.
#[inline(always)]
fn wide(element: bf16) -> f32 {
    f32::from_bits(u32::from(element.to_bits()) << 16)
}

simd_kernel! {
    fn widen_bf16<S>(elements: &[bf16], values: &mut [f32]) {
        for (value, element) in values.iter_mut().zip(elements) {
            *value = wide(*element);
        }
    }
}

simd_kernel! {
    /// Selects the instructions once for many short rows.
    fn widen_bf16_rows<S>(
        elements: &[bf16],
        stride: usize,
        values: &mut [f32],
        into_stride: usize,
        sizes: [usize; 2],
    ) {
        let [rows, cols] = sizes;
        for row in 0..rows {
            let (row, values) = (&elements[row * stride..][..cols], &mut values[row * into_stride..][..cols]);
            for (value, element) in values.iter_mut().zip(row) {
                *value = wide(*element);
            }
        }
    }
}

simd_kernel! {
    fn round_to_bf16<S>(values: &[f32], elements: &mut [bf16]) {
        for (element, value) in elements.iter_mut().zip(values) {
            *element = bf16::from_f32(*value);
        }
    }
}

/// `half` uses the CPU's own conversions for whole slices, if it has them.
impl Float for f16 {
    fn widen(elements: &[Self], values: &mut [f32]) {
        elements.convert_to_f32_slice(values);
    }

    fn round(values: &[f32], elements: &mut [Self]) {
        elements.convert_from_f32_slice(values);
    }
}

/// Converts elements, on the threads of the pool.
pub(crate) fn convert<S: Float, T: Float>(source: &[S], target: &mut [T]) {
    let block = rows_per_block(target.len(), 1);
    let blocks = (source.par_chunks(block), target.par_chunks_mut(block)).into_par_iter();
    blocks.for_each(|(source, target)| convert_block(source, target));
}

fn convert_block<S: Float, T: Float>(source: &[S], target: &mut [T]) {
    if let Some(values) = S::as_f32(source) {
        return T::round(values, target);
    }
    if let Some(values) = T::as_f32_mut(target) {
        return S::widen(source, values);
    }
    let mut values = [0.0; CHUNK];
    for (source, target) in source.chunks(CHUNK).zip(target.chunks_mut(CHUNK)) {
        let values = &mut values[..source.len()];
        S::widen(source, values);
        T::round(values, target);
    }
}
