//! Strided matrix views of `[batch, tokens, heads, head_dim]` tensors, and their products.

use crate::ops::gemm::tile::{TILE, transpose};
use crate::ops::gemm::unpacked::{Product, multiply};
use crate::ops::simd::simd_kernel;
use std::{marker::PhantomData, ops::Range};

/// A read-only matrix within a slice; one of its strides is 1.
#[derive(Clone, Copy)]
pub(in crate::ops::attention) struct Mat<'a, T = f32> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Rows of `cols` elements, `row_stride` apart, from the start of `data`.
    pub(super) fn new(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(fits(data.len(), rows, cols, row_stride), "matrix exceeds its slice");
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    pub(super) fn num_cols(&self) -> usize {
        self.cols
    }

    /// A view of some of the rows; not for transposed views.
    pub(super) fn rows(self, rows: Range<usize>) -> Self {
        assert_eq!(self.col_stride, 1);
        Self::new(&self.data[rows.start * self.row_stride..], rows.len(), self.cols, self.row_stride)
    }

    /// A view of some of the columns.
    pub(super) fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.end <= self.cols);
        Self { data: &self.data[columns.start * self.col_stride..], cols: columns.len(), ..self }
    }

    /// The transposed view.
    pub(super) fn t(self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    /// The elements, the numbers of rows and columns, and the distances between them.
    pub(super) fn parts(self) -> (&'a [T], [usize; 2], [usize; 2]) {
        (self.data, [self.rows, self.cols], [self.row_stride, self.col_stride])
    }
}

/// A matrix to write to; each row is contiguous.
///
/// Not a slice, because several threads hold the interleaved rows of one tensor.
pub(in crate::ops::attention) struct MatMut<'a> {
    data: *mut f32,
    rows: usize,
    cols: usize,
    row_stride: usize,
    _borrowed: PhantomData<&'a mut [f32]>,
}

impl<'a> MatMut<'a> {
    /// Rows of `cols` elements, `row_stride` apart, from the start of `data`.
    pub(super) fn new(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(fits(data.len(), rows, cols, row_stride), "matrix exceeds its slice");
        Self { data: data.as_mut_ptr(), rows, cols, row_stride, _borrowed: PhantomData }
    }

    #[inline(always)]
    pub(super) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: the view's rows are in bounds and, while it lives, nobody else's.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.row_stride), self.cols) }
    }

    /// The matrix must have the shape of `lhs * rhs`.
    pub(super) fn expect_product<T>(&self, lhs: &Mat<'_, T>, rhs: &Mat<'_, T>) {
        assert_eq!((self.rows, self.cols, lhs.cols), (lhs.rows, rhs.cols, rhs.rows));
    }

    /// Overwrites the matrix with rows that lie one behind the other.
    pub(super) fn copy_from(&mut self, rows: &[f32]) {
        for (index, source) in rows.chunks(self.cols).take(self.rows).enumerate() {
            self.row(index).copy_from_slice(source);
        }
    }

    pub(super) fn fill(&mut self, value: f32) {
        for row in 0..self.rows {
            self.row(row).fill(value);
        }
    }
}

fn fits(len: usize, rows: usize, cols: usize, row_stride: usize) -> bool {
    cols <= row_stride && (rows == 0 || (rows - 1) * row_stride + cols <= len)
}

/// Whether a product replaces its destination or adds to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::ops::attention) enum Store {
    Overwrite,
    Add,
}

/// `dst (+)= factor * lhs * rhs` on the calling thread.
pub(super) fn multiply_f32(dst: MatMut<'_>, store: Store, factor: f32, lhs: Mat<'_>, rhs: Mat<'_>) {
    dst.expect_product(&lhs, &rhs);
    assert_eq!(rhs.col_stride, 1, "rows of the right operand are read as vectors");
    let product = Product {
        rows: dst.rows,
        cols: dst.cols,
        terms: lhs.cols,
        dst: dst.data,
        dst_stride: dst.row_stride,
        lhs: lhs.data.as_ptr(),
        lhs_strides: [lhs.row_stride, lhs.col_stride],
        rhs: rhs.data.as_ptr(),
        rhs_stride: rhs.row_stride,
        factor,
        add: store == Store::Add,
    };
    // SAFETY: the views are in bounds of live slices (checked where they are made), the shapes agree, and
    // `dst` is the only way to its elements.
    unsafe { multiply(product) }
}

/// A tensor `[batch, tokens, heads, head_dim]` to read.
#[derive(Clone, Copy)]
pub(in crate::ops::attention) struct Heads<'a, T = f32> {
    data: &'a [T],
    tokens: usize,
    heads: usize,
    head_dim: usize,
}

impl<'a, T: Copy> Heads<'a, T> {
    pub(in crate::ops::attention) fn new(
        data: &'a [T],
        tokens: usize,
        heads: usize,
        head_dim: usize,
    ) -> Self {
        Self { data, tokens, heads, head_dim }
    }

    pub(super) fn num_tokens(&self) -> usize {
        self.tokens
    }

    pub(super) fn num_heads(&self) -> usize {
        self.heads
    }

    pub(super) fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// A copy without gaps of [`Self::head`], in `into`.
    ///
    /// Rows of a head are a power of two apart as a rule, so they share few cache sets: a tile that reads them again and
    /// again copies them together once.
    pub(super) fn gather<'b>(
        &self,
        row: usize,
        head: usize,
        tokens: &Range<usize>,
        into: &'b mut [T],
    ) -> Mat<'b, T> {
        let source = self.head(row, head, tokens);
        copy_rows(source.data, source.row_stride, self.head_dim, &mut into[..tokens.len() * self.head_dim]);
        Mat::new(into, tokens.len(), self.head_dim, self.head_dim)
    }

    /// One head of a batch row from its first element on, rows of `head_dim` [`Self::row_stride`] apart.
    pub(super) fn head_slice(&self, row: usize, head: usize) -> &'a [T] {
        &self.data[(row * self.tokens * self.heads + head) * self.head_dim..]
    }

    /// Distance between two tokens of a head.
    pub(super) fn row_stride(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Some tokens of one head, `[tokens, head_dim]`.
    pub(super) fn head(&self, row: usize, head: usize, tokens: &Range<usize>) -> Mat<'a, T> {
        assert!(head < self.heads && tokens.end <= self.tokens);
        let start = ((row * self.tokens + tokens.start) * self.heads + head) * self.head_dim;
        Mat::new(&self.data[start..], tokens.len(), self.head_dim, self.row_stride())
    }
}

impl Heads<'_> {
    /// As [`Self::gather`], transposed: `[head_dim, tokens]` with rows `stride` apart, a multiple of [`TILE`].
    pub(super) fn gather_transposed<'b>(
        &self,
        row: usize,
        head: usize,
        tokens: &Range<usize>,
        stride: usize,
        into: &'b mut [f32],
    ) -> Mat<'b> {
        let Mat { data, rows, row_stride, .. } = self.head(row, head, tokens);
        transpose_rows(data, (rows, row_stride), self.head_dim, into, stride);
        Mat::new(into, self.head_dim, tokens.len(), stride)
    }
}

simd_kernel! {
    /// Writes `rows` rows of `cols` elements as columns, and up to a whole tile of zeros behind the last of them.
    fn transpose_rows<S>(data: &[f32], rows: (usize, usize), cols: usize, into: &mut [f32], stride: usize) {
        let (rows, row_stride) = rows;
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

/// Copies rows `stride` apart.
#[inline(always)]
fn copy_rows<T: Copy>(data: &[T], stride: usize, cols: usize, into: &mut [T]) {
    for (index, copy) in into.chunks_exact_mut(cols).enumerate() {
        let row = &data[index * stride..][..cols];
        let ((whole, tail), (copies, copy_tail)) = (row.as_chunks::<TILE>(), copy.as_chunks_mut::<TILE>());
        for (copy, chunk) in copies.iter_mut().zip(whole) {
            *copy = *chunk;
        }
        copy_tail.copy_from_slice(tail);
    }
}

/// A whole tile's row has a length that the compiler knows.
#[inline(always)]
fn copy_up_to(source: &[f32], into: &mut [f32; TILE]) {
    match source.first_chunk() {
        Some(whole) => *into = *whole,
        None => into[..source.len()].copy_from_slice(source),
    }
}

/// A tensor `[batch, tokens, heads, head_dim]` of which each thread writes its own heads and tokens.
pub(super) struct HeadsMut<'a> {
    data: *mut f32,
    len: usize,
    tokens: usize,
    heads: usize,
    head_dim: usize,
    _borrowed: PhantomData<&'a mut [f32]>,
}

// SAFETY: elements are reached through `head` only, whose callers promise not to overlap.
unsafe impl Sync for HeadsMut<'_> {}

impl<'a> HeadsMut<'a> {
    pub(super) fn new(data: &'a mut [f32], tokens: usize, heads: usize, head_dim: usize) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), tokens, heads, head_dim, _borrowed: PhantomData }
    }

    /// Some tokens of one head, `[tokens, head_dim]`.
    ///
    /// # Safety
    /// While the view lives, no other view of the same row and head may share a token with it.
    pub(super) unsafe fn head(&self, row: usize, head: usize, tokens: &Range<usize>) -> MatMut<'_> {
        assert!(head < self.heads && tokens.end <= self.tokens);
        let row_stride = self.heads * self.head_dim;
        let start = ((row * self.tokens + tokens.start) * self.heads + head) * self.head_dim;
        assert!(start <= self.len && fits(self.len - start, tokens.len(), self.head_dim, row_stride));
        // SAFETY: in bounds, as just checked.
        let data = unsafe { self.data.add(start) };
        MatMut { data, rows: tokens.len(), cols: self.head_dim, row_stride, _borrowed: PhantomData }
    }
}
