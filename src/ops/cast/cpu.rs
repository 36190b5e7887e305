//! The conversion on slices.

use crate::ops::parallel::rows_per_block;
use crate::ops::simd::simd_kernel;
use crate::tensor::Element;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

/// Values that are converted at a time: they stay in the first-level cache.
const CHUNK: usize = 1024;

/// An element type of mixed precision.
pub(in crate::ops) trait Float: Element {
    /// Reads elements as f32.
    fn widen(elements: &[Self], values: &mut [f32]);
    /// Rounds values to elements, to nearest even.
    fn round(values: &[f32], elements: &mut [Self]);
}

impl Float for f32 {
    fn widen(elements: &[Self], values: &mut [f32]) {
        values.copy_from_slice(elements);
    }

    fn round(values: &[f32], elements: &mut [Self]) {
        elements.copy_from_slice(values);
    }
}

impl Float for bf16 {
    fn widen(elements: &[Self], values: &mut [f32]) {
        widen_bf16(elements, values);
    }

    fn round(values: &[f32], elements: &mut [Self]) {
        round_to_bf16(values, elements);
    }
}

simd_kernel! {
    fn widen_bf16<S>(elements: &[bf16], values: &mut [f32]) {
        for (value, element) in values.iter_mut().zip(elements) {
            *value = element.to_f32();
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

/// `half` uses the machine's own conversions, where it has them, for whole slices.
impl Float for f16 {
    fn widen(elements: &[Self], values: &mut [f32]) {
        elements.convert_to_f32_slice(values);
    }

    fn round(values: &[f32], elements: &mut [Self]) {
        elements.convert_from_f32_slice(values);
    }
}

pub(in crate::ops) fn convert<S: Float, T: Float>(source: &[S], target: &mut [T]) {
    let block = rows_per_block(target.len(), 1);
    (source.par_chunks(block), target.par_chunks_mut(block)).into_par_iter().for_each(|(source, target)| {
        let mut values = [0.0; CHUNK];
        for (source, target) in source.chunks(CHUNK).zip(target.chunks_mut(CHUNK)) {
            let values = &mut values[..source.len()];
            S::widen(source, values);
            T::round(values, target);
        }
    });
}
