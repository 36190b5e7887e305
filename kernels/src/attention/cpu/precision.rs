//! The precision of the matmuls: f32, or bf16 with f32 sums on CPUs that multiply bf16 faster.
//!
//! Scores, probabilities and their gradients are f32 tiles in either case. As operands of a bf16 matmul they
//! are rounded to bf16, as in FlashAttention (Dao 2023: `P` and `dS` are converted before the second matmul).

use super::matrix::{Heads, Mat, MatMut, Store, multiply_f32};
use super::softmax::ROW_STRIDE;
use crate::cast::Float;
use crate::gemm::bf16::{Block, Kernel, multiply_on_caller, packed_bytes};
use crate::gemm::operand::MatmulOperand;
use crate::simd::simd_kernel;
use half::bf16;
use std::marker::PhantomData;
use std::ops::Range;

/// How the matmuls of attention are computed.
///
/// A matmul reads its left operand element by element, its right one row by row. An element of an operand may
/// hold several terms. So the same values may need different copies as left or right operand, and for terms
/// that are tokens or along `head_dim`. The defaults fit operands for which one copy is enough.
pub(in crate::attention) trait Operand: Sync + 'static {
    /// Element type of the tensors.
    type Element: Float;

    /// Element type of the operands.
    type Tile: Copy + Send + Sync;

    /// The instructions of the matmuls.
    type Kernel: Copy + Send + Sync;

    /// Maximum number of queries of a rectangle whose scores the forward pass computes together.
    const STRIP: usize;

    /// The same for the backward pass.
    const BACKWARD_STRIP: usize;

    /// Terms per element. Rectangles begin at multiples of it: for keys see
    /// [`rectangles`](super::tiles::rectangles); for queries, the block sizes are multiples.
    const TERMS: usize = 1;

    /// f32 elements of scratch for [`Self::gather`].
    fn rows_scratch(tokens: usize, head_dim: usize) -> usize {
        tokens * head_dim
    }

    /// Scratch for [`Self::gather_terms`].
    fn terms_scratch(tokens: usize, head_dim: usize) -> usize {
        Self::rows_scratch(tokens, head_dim)
    }

    /// Scratch for [`Self::gather_both`].
    fn both_scratch(tokens: usize, head_dim: usize) -> usize {
        Self::rows_scratch(tokens, head_dim)
    }

    /// Scratch for [`Self::gather_transposed`] of a block of keys.
    fn columns_scratch(head_dim: usize) -> usize {
        ROW_STRIDE * head_dim
    }

    /// Scratch for [`Self::from_tile`] or [`Self::from_tile_transposed`] of a tile with so many rows.
    fn tile_scratch(rows: usize) -> usize;

    /// Scratch for [`Self::from_tile_both`].
    fn both_tiles_scratch(rows: usize) -> usize {
        Self::tile_scratch(rows)
    }

    /// Bytes that a thread retains after multiplying tiles of `queries` by `keys`.
    fn packed_bytes(queries: usize, keys: usize, head_dim: usize) -> usize;

    /// Copies some tokens of one head, `[tokens, head_dim]`, to `memory`: the left operand of a matmul over
    /// `head_dim`.
    fn gather<'b>(
        heads: &Heads<'_, Self::Element>,
        at: (usize, usize),
        tokens: &Range<usize>,
        memory: &'b mut [f32],
    ) -> Mat<'b, Self::Tile>;

    /// Copies the right operand of a matmul over the tokens: `[tokens / TERMS, head_dim]`.
    fn gather_terms<'b>(
        heads: &Heads<'_, Self::Element>,
        at: (usize, usize),
        tokens: &Range<usize>,
        memory: &'b mut [f32],
    ) -> Mat<'b, Self::Tile> {
        Self::gather(heads, at, tokens, memory)
    }

    /// [`gather`](Self::gather) and [`gather_terms`](Self::gather_terms).
    fn gather_both<'b>(
        heads: &Heads<'_, Self::Element>,
        at: (usize, usize),
        tokens: &Range<usize>,
        memory: &'b mut [f32],
    ) -> [Mat<'b, Self::Tile>; 2] {
        [Self::gather(heads, at, tokens, memory); 2]
    }

    /// Copies the right operand of a matmul over `head_dim`: `[head_dim / TERMS, tokens]`.
    fn gather_transposed<'b>(
        heads: &Heads<'_, Self::Element>,
        at: (usize, usize),
        tokens: &Range<usize>,
        memory: &'b mut [f32],
    ) -> Mat<'b, Self::Tile>;

    /// The rows of these tokens in the result of [`gather_terms`](Self::gather_terms) for a block that begins
    /// with token 0.
    fn terms(tokens: Range<usize>) -> Range<usize> {
        tokens.start / Self::TERMS..tokens.end.div_ceil(Self::TERMS)
    }

    /// A tile of f32 values as the left operand of a matmul over its columns, `[rows, cols / TERMS]`.
    /// Converted in `buffer` if necessary.
    ///
    /// # Shapes
    /// `tile` has rows of `cols` values [`ROW_STRIDE`] apart.
    fn from_tile<'a>(tile: &'a [f32], rows: usize, cols: usize, buffer: &'a mut [f32])
    -> Mat<'a, Self::Tile>;

    /// The left operand of a matmul over the tile's rows: `[cols, rows / TERMS]`.
    fn from_tile_transposed<'a>(
        tile: &'a [f32],
        rows: usize,
        cols: usize,
        buffer: &'a mut [f32],
    ) -> Mat<'a, Self::Tile> {
        Self::from_tile(tile, rows, cols, buffer).t()
    }

    /// [`from_tile`](Self::from_tile) and [`from_tile_transposed`](Self::from_tile_transposed).
    fn from_tile_both<'a>(
        tile: &'a [f32],
        rows: usize,
        cols: usize,
        buffer: &'a mut [f32],
    ) -> [Mat<'a, Self::Tile>; 2] {
        let tile = Self::from_tile(tile, rows, cols, buffer);
        [tile, tile.t()]
    }

    /// Computes `dst (+)= factor * lhs * rhs` on the calling thread.
    fn multiply(
        kernel: Self::Kernel,
        dst: MatMut<'_>,
        store: Store,
        factor: f32,
        lhs: Mat<'_, Self::Tile>,
        rhs: Mat<'_, Self::Tile>,
    );
}

/// Matmuls in f32, for elements of any type.
pub(in crate::attention) struct InF32<E>(PhantomData<E>);

impl<E: Float> Operand for InF32<E> {
    type Element = E;
    type Tile = f32;
    type Kernel = ();

    /// A strip's scores for a block of keys stay in the first-level cache between the two matmuls, and all
    /// heights of the matmuls' tiles divide it.
    const STRIP: usize = 24;

    /// Every strip adds to the gradients of all its keys, so fewer and longer strips add less often.
    const BACKWARD_STRIP: usize = 48;

    fn tile_scratch(_: usize) -> usize {
        0
    }

    fn packed_bytes(_: usize, _: usize, _: usize) -> usize {
        0
    }

    fn gather<'b>(
        heads: &Heads<'_, E>,
        at: (usize, usize),
        tokens: &Range<usize>,
        memory: &'b mut [f32],
    ) -> Mat<'b> {
        heads.gather_f32(at, tokens, memory)
    }

    fn gather_transposed<'b>(
        heads: &Heads<'_, E>,
        at: (usize, usize),
        tokens: &Range<usize>,
        memory: &'b mut [f32],
    ) -> Mat<'b> {
        heads.gather_transposed(at, tokens, ROW_STRIDE, memory)
    }

    fn from_tile<'a>(tile: &'a [f32], rows: usize, cols: usize, _: &'a mut [f32]) -> Mat<'a> {
        Mat::new(tile, rows, cols, ROW_STRIDE)
    }

    fn multiply((): (), dst: MatMut<'_>, store: Store, factor: f32, lhs: Mat<'_>, rhs: Mat<'_>) {
        multiply_f32(dst, store, factor, lhs, rhs);
    }
}

/// bf16 matmuls with f32 sums and packed operands, for AMX.
pub(in crate::attention) struct InBf16;

impl Operand for InBf16 {
    type Element = bf16;
    type Tile = bf16;
    type Kernel = Kernel;

    /// A matmul packs both operands, which pays off for large ones.
    const STRIP: usize = 240;

    const BACKWARD_STRIP: usize = 240;

    fn tile_scratch(rows: usize) -> usize {
        (rows * ROW_STRIDE).div_ceil(2)
    }

    fn packed_bytes(queries: usize, keys: usize, head_dim: usize) -> usize {
        packed_bytes([queries, keys.max(head_dim), keys.max(head_dim)])
    }

    fn gather<'b>(
        heads: &Heads<'_, bf16>,
        at: (usize, usize),
        tokens: &Range<usize>,
        memory: &'b mut [f32],
    ) -> Mat<'b, bf16> {
        heads.gather(at, tokens, scratch_as_bf16(memory))
    }

    fn gather_transposed<'b>(
        heads: &Heads<'_, bf16>,
        at: (usize, usize),
        tokens: &Range<usize>,
        memory: &'b mut [f32],
    ) -> Mat<'b, bf16> {
        Self::gather(heads, at, tokens, memory).t()
    }

    fn from_tile<'a>(tile: &'a [f32], rows: usize, cols: usize, buffer: &'a mut [f32]) -> Mat<'a, bf16> {
        let rounded = scratch_as_bf16(buffer);
        round_rows(tile, rows, cols, rounded);
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
            store_scaled(&mut dst, (row, column), sums, factor, add);
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
    fn store_scaled<S>(dst: &mut MatMut<'_>, at: (usize, usize), sums: Block<'_>, factor: f32, add: bool) {
        let ((first_row, column), Block { rows, width }) = (at, sums);
        for (row, sums) in (first_row..).zip(rows) {
            for (element, sum) in dst.row(row)[column..column + width].iter_mut().zip(sums) {
                let old = if add { *element } else { 0.0 };
                *element = S::mul_add(factor, *sum, old);
            }
        }
    }
}
