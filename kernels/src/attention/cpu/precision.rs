//! The precision of the matmuls: f32, or bf16 with f32 sums on CPUs that multiply bf16 faster.
//!
//! Scores, probabilities and their gradients are f32 tiles in either case. As operands of a bf16 matmul they
//! are rounded to bf16, as in FlashAttention (Dao 2023: `P` and `dS` are converted before the second matmul).

use super::tiles::ROW_STRIDE;
use crate::cast::Float;
use crate::gemm::bf16::{Block, Kernel, multiply_on_caller, packed_bytes};
use crate::gemm::operand::MatmulOperand;
use crate::matrix::{Mat, MatMut, Store, multiply_f32};
use crate::simd::simd_kernel;
use half::bf16;
use std::marker::PhantomData;
use std::ops::Range;

/// A copy of tokens of one head for one kind of matmul. A matmul reads its left operand element by element, its right one
/// row by row.
#[derive(Clone, Copy)]
pub(in crate::attention) enum Form {
    /// `[tokens, head_dim / TERMS]`: the left operand of a matmul over `head_dim`.
    Rows,
    /// `[tokens / TERMS, head_dim]`: the right operand of a matmul over the tokens.
    TokenTerms,
    /// `[head_dim / TERMS, tokens]`: the right operand of a matmul over `head_dim`.
    Transposed,
}

/// The data type and instructions of attention's matmuls.
pub(in crate::attention) trait Precision: Sync + 'static {
    /// Element type of the tensors.
    type Element: Float;

    /// Element type of the operands.
    type Operand: Copy + Send + Sync;

    /// The instructions of the matmuls.
    type Kernel: Copy + Send + Sync;

    /// Maximum number of queries of a rectangle whose scores the forward pass computes together.
    const STRIP: usize;

    /// The same for the backward pass.
    const BACKWARD_STRIP: usize;

    /// Terms of a sum per element of an operand. With one, [`Form::Rows`] also serves as [`Form::TokenTerms`]. Rectangles
    /// begin at multiples of it: for keys see [`rectangles`](super::tiles::rectangles); for queries, the block sizes are
    /// multiples.
    const TERMS: usize = 1;

    /// f32 elements of scratch for [`Self::gather`].
    fn scratch(form: Form, tokens: usize, head_dim: usize) -> usize;

    /// Scratch for [`Self::from_tile`] or [`Self::from_tile_transposed`] of a tile with so many rows.
    fn tile_scratch(rows: usize) -> usize;

    /// Bytes that a thread retains after multiplying tiles of `queries` by `keys`.
    fn packed_bytes(queries: usize, keys: usize, head_dim: usize) -> usize;

    /// Copies some tokens of one head, `[tokens, head_dim]`, to `memory`.
    fn gather<'b>(
        tokens: Mat<'_, Self::Element>,
        form: Form,
        memory: &'b mut [f32],
    ) -> Mat<'b, Self::Operand>;

    /// The tokens as [`Form::TokenTerms`], copied to `memory` unless `rows`, their copy as [`Form::Rows`], serves as that.
    fn gather_terms<'b>(
        tokens: Mat<'_, Self::Element>,
        rows: Mat<'b, Self::Operand>,
        memory: &'b mut [f32],
    ) -> Mat<'b, Self::Operand> {
        if Self::TERMS == 1 { rows } else { Self::gather(tokens, Form::TokenTerms, memory) }
    }

    /// A tile of f32 values, with rows [`ROW_STRIDE`] apart, as the left operand of a matmul over its columns:
    /// `[rows, cols / TERMS]`. Converted in `buffer` if necessary.
    fn from_tile<'a>(tile: Mat<'a>, buffer: &'a mut [f32]) -> Mat<'a, Self::Operand>;

    /// The left operand of a matmul over the tile's rows: `[cols, rows / TERMS]`.
    fn from_tile_transposed<'a>(tile: Mat<'a>, buffer: &'a mut [f32]) -> Mat<'a, Self::Operand> {
        Self::from_tile(tile, buffer).t()
    }

    /// Computes `dst (+)= factor * lhs * rhs` on the calling thread.
    fn multiply(
        kernel: Self::Kernel,
        dst: MatMut<'_>,
        store: Store,
        factor: f32,
        lhs: Mat<'_, Self::Operand>,
        rhs: Mat<'_, Self::Operand>,
    );
}

/// The rows of these tokens in a copy of [`Form::TokenTerms`] that begins with token 0.
pub(super) fn terms<T: Precision>(tokens: Range<usize>) -> Range<usize> {
    tokens.start / T::TERMS..tokens.end.div_ceil(T::TERMS)
}

/// Scratch for a copy in f32.
fn f32_scratch(form: Form, tokens: usize, head_dim: usize) -> usize {
    match form {
        Form::Rows | Form::TokenTerms => tokens * head_dim,
        Form::Transposed => ROW_STRIDE * head_dim,
    }
}

/// Matmuls in f32, for elements of any type.
pub(in crate::attention) struct InF32<E>(PhantomData<E>);

impl<E: Float> Precision for InF32<E> {
    type Element = E;
    type Operand = f32;
    type Kernel = ();

    /// A strip's scores for a block of keys stay in the first-level cache between the two matmuls, and all
    /// heights of the matmuls' tiles divide it.
    const STRIP: usize = 24;

    /// Every strip adds to the gradients of all its keys, so fewer and longer strips add less often.
    const BACKWARD_STRIP: usize = 48;

    fn scratch(form: Form, tokens: usize, head_dim: usize) -> usize {
        f32_scratch(form, tokens, head_dim)
    }

    fn tile_scratch(_: usize) -> usize {
        0
    }

    fn packed_bytes(_: usize, _: usize, _: usize) -> usize {
        0
    }

    fn gather<'b>(tokens: Mat<'_, E>, form: Form, memory: &'b mut [f32]) -> Mat<'b> {
        match form {
            Form::Rows | Form::TokenTerms => tokens.gather_f32(memory),
            Form::Transposed => tokens.gather_transposed(ROW_STRIDE, memory),
        }
    }

    fn from_tile<'a>(tile: Mat<'a>, _: &'a mut [f32]) -> Mat<'a> {
        tile
    }

    fn multiply((): (), dst: MatMut<'_>, store: Store, factor: f32, lhs: Mat<'_>, rhs: Mat<'_>) {
        multiply_f32(dst, store, factor, lhs, rhs);
    }
}

/// bf16 matmuls with f32 sums and packed operands, for AMX.
pub(in crate::attention) struct InBf16;

impl Precision for InBf16 {
    type Element = bf16;
    type Operand = bf16;
    type Kernel = Kernel;

    /// A matmul packs both operands, which pays off for large ones.
    const STRIP: usize = 240;

    const BACKWARD_STRIP: usize = 240;

    /// Twice what the copies of bf16 need.
    fn scratch(form: Form, tokens: usize, head_dim: usize) -> usize {
        f32_scratch(form, tokens, head_dim)
    }

    fn tile_scratch(rows: usize) -> usize {
        (rows * ROW_STRIDE).div_ceil(2)
    }

    fn packed_bytes(queries: usize, keys: usize, head_dim: usize) -> usize {
        packed_bytes([queries, keys.max(head_dim), keys.max(head_dim)])
    }

    fn gather<'b>(tokens: Mat<'_, bf16>, form: Form, memory: &'b mut [f32]) -> Mat<'b, bf16> {
        let copy = tokens.gather(scratch_as_bf16(memory));
        match form {
            Form::Rows | Form::TokenTerms => copy,
            Form::Transposed => copy.t(),
        }
    }

    fn from_tile<'a>(tile: Mat<'a>, buffer: &'a mut [f32]) -> Mat<'a, bf16> {
        let (values, [rows, cols], _) = tile.parts();
        let rounded = scratch_as_bf16(buffer);
        round_rows(values, rows, cols, rounded);
        Mat::new(rounded, rows, cols, ROW_STRIDE)
    }

    fn multiply(
        kernel: Kernel,
        mut dst: MatMut<'_>,
        store: Store,
        factor: f32,
        lhs: Mat<'_, bf16>,
        rhs: Mat<'_, bf16>,
    ) {
        dst.expect_matmul(&lhs, &rhs);
        let (lhs, rhs) = (lines_of(lhs), lines_of(rhs.t()));
        let add = store == Store::Add;
        multiply_on_caller(kernel, &lhs, &rhs, |row, column, sums| {
            store_scaled(&mut dst, row, column, sums, factor, add);
        });
    }
}

/// Scratch as twice as many bf16 elements.
fn scratch_as_bf16(memory: &mut [f32]) -> &mut [bf16] {
    let elems = 2 * memory.len();
    // SAFETY: the same bytes with the same lifetime. bf16 has half the size and alignment of f32, and any
    // bits are valid for both.
    unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), elems) }
}

fn lines_of(matrix: Mat<'_, bf16>) -> MatmulOperand<'_, bf16> {
    let (data, sizes, strides) = matrix.parts();
    MatmulOperand::strided(data, sizes, strides).expect("a `Mat` lies within its slice and has a stride of 1")
}

simd_kernel! {
    fn round_rows<S>(tile: &[f32], rows: usize, cols: usize, rounded: &mut [bf16]) {
        let rounded = rounded.chunks_mut(ROW_STRIDE);
        for (values, rounded) in tile.chunks(ROW_STRIDE).zip(rounded).take(rows) {
            for (value, rounded) in values[..cols].iter().zip(&mut rounded[..cols]) {
                *rounded = bf16::from_f32(*value);
            }
        }
    }
}

simd_kernel! {
    /// Writes the sums of a block to `dst` from an element on, or adds them.
    fn store_scaled<S>(
        dst: &mut MatMut<'_>,
        first_row: usize,
        column: usize,
        sums: Block<'_>,
        factor: f32,
        add: bool,
    ) {
        for (row, row_sums) in (first_row..).zip(sums.rows) {
            for (element, sum) in dst.row(row)[column..column + sums.width].iter_mut().zip(row_sums) {
                let old = if add { *element } else { 0.0 };
                *element = S::mul_add(factor, *sum, old);
            }
        }
    }
}
