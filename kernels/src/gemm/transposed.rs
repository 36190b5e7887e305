//! Transposes rows of any element type to f32 columns.

use super::tile::{TILE, pairs_of, transpose};
use crate::cast::Float;
use crate::simd::simd_kernel;
use half::slice::HalfFloatSliceExt;

/// Columns of a strip of rows that are converted at a time: they stay in the first-level cache.
const WIDE_COLS: usize = 128;

/// Writes `[rows, cols]` elements as f32 columns, followed by zeros up to a whole tile. The rows are `row_stride` apart; the
/// rows of the result are `stride` apart, a multiple of [`TILE`].
pub(crate) fn transpose_rows<T: Float>(
    data: &[T],
    row_stride: usize,
    into: &mut [f32],
    stride: usize,
    [rows, cols]: [usize; 2],
) {
    if let Some(data) = T::as_f32(data) {
        return transpose_f32(data, row_stride, into, stride, [rows, cols]);
    }
    if let Some(data) = T::as_bf16(data) {
        return transpose_bf16(data.reinterpret_cast(), row_stride, into, stride, [rows, cols]);
    }
    let mut wide = [0.0; TILE * WIDE_COLS];
    for first_row in (0..rows).step_by(TILE) {
        let rows = TILE.min(rows - first_row);
        for first_col in (0..cols).step_by(WIDE_COLS) {
            let cols = WIDE_COLS.min(cols - first_col);
            let strip = &data[first_row * row_stride + first_col..];
            T::widen_rows(strip, row_stride, &mut wide, WIDE_COLS, [rows, cols]);
            let into = &mut into[first_col * stride + first_row..];
            transpose_f32(&wide, WIDE_COLS, into, stride, [rows, cols]);
        }
    }
}

simd_kernel! {
    fn transpose_f32<S>(data: &[f32], row_stride: usize, into: &mut [f32], stride: usize, sizes: [usize; 2]) {
        let [rows, cols] = sizes;
        for first_row in (0..rows).step_by(TILE) {
            for first_col in (0..cols).step_by(TILE) {
                let mut tile = [[0.0; TILE]; TILE];
                for (row, elements) in (first_row..rows).zip(&mut tile) {
                    copy_up_to(&data[row * row_stride + first_col..][..TILE.min(cols - first_col)], elements);
                }
                for (col, elements) in (first_col..cols).zip(&transpose(tile)) {
                    into[col * stride + first_row..][..TILE].copy_from_slice(elements);
                }
            }
        }
    }
}

simd_kernel! {
    /// Transposes two columns at a time, as one column of words.
    fn transpose_bf16<S>(bits: &[u16], row_stride: usize, into: &mut [f32], stride: usize, sizes: [usize; 2]) {
        let [rows, cols] = sizes;
        for first_row in (0..rows).step_by(TILE) {
            for first_col in (0..cols).step_by(2 * TILE) {
                let mut tile = [[0; TILE]; TILE];
                for (row, words) in (first_row..rows).zip(&mut tile) {
                    *words = pairs_of(&bits[row * row_stride + first_col..][..(2 * TILE).min(cols - first_col)]);
                }
                for (col, words) in (first_col..cols).step_by(2).zip(&transpose(tile)) {
                    for (value, word) in into[col * stride + first_row..][..TILE].iter_mut().zip(words) {
                        *value = f32::from_bits(word << 16);
                    }
                    if col + 1 < cols {
                        for (value, word) in into[(col + 1) * stride + first_row..][..TILE].iter_mut().zip(words) {
                            *value = f32::from_bits(word & 0xffff_0000);
                        }
                    }
                }
            }
        }
    }
}

/// A full tile's row has a constant length.
#[inline(always)]
fn copy_up_to(source: &[f32], into: &mut [f32; TILE]) {
    match source.first_chunk() {
        Some(whole) => *into = *whole,
        None => into[..source.len()].copy_from_slice(source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::at_every_level;
    use half::{bf16, f16};

    fn check<T: Float>(rows: usize, cols: usize, level: impl std::fmt::Debug) {
        let (row_stride, stride) = (cols + 3, rows.next_multiple_of(TILE) + TILE);
        // Integers that encode their position and fit bf16 exactly.
        let values: Vec<f32> = (0..rows * row_stride).map(|at| (at % 251) as f32 - 125.0).collect();
        let mut elements = vec![T::zero(); values.len()];
        T::round(&values, &mut elements);
        let mut columns = vec![f32::NAN; cols * stride];
        transpose_rows(&elements, row_stride, &mut columns, stride, [rows, cols]);
        let mut widened = vec![f32::NAN; rows * stride.max(cols)];
        T::widen_rows(&elements, row_stride, &mut widened, stride.max(cols), [rows, cols]);
        for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
            let expected = values[row * row_stride + col];
            let label = format!("{:?} {rows} x {cols} at {level:?}: {row}, {col}", T::DTYPE);
            assert_eq!(columns[col * stride + row], expected, "{label}");
            assert_eq!(widened[row * stride.max(cols) + col], expected, "{label}, not transposed");
        }
        for (col, column) in columns.chunks(stride).enumerate() {
            let padding = rows..rows.next_multiple_of(TILE);
            assert!(
                column[padding].iter().all(|value| *value == 0.0),
                "{rows} x {cols}: behind column {col}"
            );
        }
    }

    #[test]
    fn every_element_is_at_its_place_and_zeros_follow() {
        at_every_level(|level| {
            for rows in [1, 15, 16, 17, 40] {
                for cols in [1, 2, 31, 32, 33, 129] {
                    check::<f32>(rows, cols, level);
                    check::<bf16>(rows, cols, level);
                    check::<f16>(rows, cols, level);
                }
            }
        });
    }
}
