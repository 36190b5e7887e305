//! bf16 matmuls with instructions that multiply pairs of terms and add both to an f32 sum, without packing.
//!
//! A word of an operand holds two terms. Terms along `head_dim` are adjacent in a row of the tensor; terms
//! that are tokens come from two rows. So a tile is copied once for each kind of matmul, which is cheap
//! compared with packing it for every matmul.

use super::precision::{Form, Precision};
use super::tiles::ROW_STRIDE;
use crate::gemm::tile::{TILE, pairs_of, transpose, word_of};
use crate::gemm::unpacked::{StridedRows, round_neighbors, round_rows};
use crate::matrix::{Mat, MatMut, Store, multiply_words};
use crate::simd::simd_kernel;
use half::bf16;
use half::slice::HalfFloatSliceExt;

/// Matmuls of bf16 pairs, with f32 sums.
pub(in crate::attention) struct InPairs;

impl Precision for InPairs {
    type Element = bf16;
    type Operand = u32;
    type Kernel = ();

    /// As in f32, whose instructions access memory in the same way.
    const STRIP: usize = 24;

    const BACKWARD_STRIP: usize = 48;

    const TERMS: usize = 2;

    fn scratch(form: Form, tokens: usize, head_dim: usize) -> usize {
        match form {
            Form::Rows => tokens * pairs(head_dim),
            Form::TokenTerms => pairs(tokens) * head_dim,
            Form::Transposed => ROW_STRIDE * pairs(head_dim),
        }
    }

    fn tile_scratch(rows: usize) -> usize {
        pairs(rows) * ROW_STRIDE
    }

    fn packed_bytes(_: usize, _: usize, _: usize) -> usize {
        0
    }

    fn gather<'b>(tokens: Mat<'_, bf16>, form: Form, memory: &'b mut [f32]) -> Mat<'b, u32> {
        let (elements, [rows, cols], [stride, _]) = tokens.parts();
        let (bits, words) = (elements.reinterpret_cast(), words_in(memory));
        match form {
            Form::Rows => {
                pairs_of_rows(bits, stride, rows, cols, words);
                Mat::new(words, rows, pairs(cols), pairs(cols))
            }
            Form::TokenTerms => {
                rows_of_pairs(bits, stride, rows, cols, words);
                Mat::new(words, pairs(rows), cols, cols)
            }
            Form::Transposed => {
                columns_of_pairs(bits, stride, rows, cols, words);
                Mat::new(words, pairs(cols), rows, ROW_STRIDE)
            }
        }
    }

    fn from_tile<'a>(tile: Mat<'a>, buffer: &'a mut [f32]) -> Mat<'a, u32> {
        let ((elements, [rows, cols], [stride, _]), words) = (tile.parts(), words_in(buffer));
        let target = StridedRows { elements: &mut words[..], stride: ROW_STRIDE / 2 };
        round_neighbors(StridedRows { elements, stride }, [rows, cols], target);
        Mat::new(words, rows, pairs(cols), ROW_STRIDE / 2)
    }

    fn from_tile_transposed<'a>(tile: Mat<'a>, buffer: &'a mut [f32]) -> Mat<'a, u32> {
        let ((elements, [rows, cols], [stride, _]), words) = (tile.parts(), words_in(buffer));
        let target = StridedRows { elements: &mut words[..], stride: ROW_STRIDE };
        round_rows(StridedRows { elements, stride }, [rows, cols], target);
        Mat::new(words, pairs(rows), cols, ROW_STRIDE).t()
    }

    fn multiply((): (), dst: MatMut<'_>, store: Store, factor: f32, lhs: Mat<'_, u32>, rhs: Mat<'_, u32>) {
        multiply_words(dst, store, factor, lhs, rhs);
    }
}

/// Number of words for so many terms.
fn pairs(terms: usize) -> usize {
    terms.div_ceil(2)
}

fn words_in(memory: &mut [f32]) -> &mut [u32] {
    bytemuck::cast_slice_mut(memory)
}

simd_kernel! {
    /// Combines adjacent elements of a row into words.
    fn pairs_of_rows<S>(bits: &[u16], stride: usize, rows: usize, cols: usize, words: &mut [u32]) {
        for (row, words) in words.chunks_exact_mut(cols.div_ceil(2)).take(rows).enumerate() {
            let row = &bits[row * stride..][..cols];
            for (words, bits) in words.chunks_mut(TILE).zip(row.chunks(2 * TILE)) {
                let pairs = pairs_of(bits);
                match words.first_chunk_mut::<TILE>() {
                    Some(whole) => *whole = pairs,
                    None => words.copy_from_slice(&pairs[..words.len()]),
                }
            }
        }
    }
}

simd_kernel! {
    /// Combines each element with the one below it into a word; zeros follow the last row.
    fn rows_of_pairs<S>(bits: &[u16], stride: usize, rows: usize, cols: usize, words: &mut [u32]) {
        for (row, words) in (0..rows).step_by(2).zip(words.chunks_exact_mut(cols)) {
            let above = &bits[row * stride..][..cols];
            if row + 1 < rows {
                let below = &bits[(row + 1) * stride..][..cols];
                for ((word, above), below) in words.iter_mut().zip(above).zip(below) {
                    *word = word_of(*above, *below);
                }
            } else {
                for (word, above) in words.iter_mut().zip(above) {
                    *word = word_of(*above, 0);
                }
            }
        }
    }
}

simd_kernel! {
    /// As [`pairs_of_rows`], written as columns of words [`ROW_STRIDE`] apart.
    fn columns_of_pairs<S>(bits: &[u16], stride: usize, rows: usize, cols: usize, words: &mut [u32]) {
        for first_row in (0..rows).step_by(TILE) {
            for first_col in (0..cols).step_by(2 * TILE) {
                let mut tile = [[0; TILE]; TILE];
                for (row, pairs) in (first_row..rows).zip(&mut tile) {
                    *pairs = pairs_of(&bits[row * stride + first_col..][..(2 * TILE).min(cols - first_col)]);
                }
                for (pair, tokens) in (first_col / 2..cols.div_ceil(2)).zip(&transpose(tile)) {
                    words[pair * ROW_STRIDE + first_row..][..TILE].copy_from_slice(tokens);
                }
            }
        }
    }
}
