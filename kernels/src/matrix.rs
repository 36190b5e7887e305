//! Strided matrix views of `[batch, tokens, heads, head_dim]` tensors, and their matmuls.

use crate::cast::{Float, copy_rows};
use crate::gemm::transposed::transpose_rows;
use crate::gemm::unpacked::{Matmul, multiply, multiply_pairs};
use std::{marker::PhantomData, ops::Range};

/// A read-only matrix within a slice; one of its strides is 1.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a, T = f32> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Rows of `cols` elements, `row_stride` apart, from the start of `data`.
    pub(crate) fn new(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(fits(data.len(), rows, cols, row_stride), "matrix exceeds its slice");
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// A range of the rows; not for transposed views.
    pub(crate) fn rows(self, rows: Range<usize>) -> Self {
        assert_eq!(self.col_stride, 1);
        Self::new(&self.data[rows.start * self.row_stride..], rows.len(), self.cols, self.row_stride)
    }

    /// A range of the columns.
    pub(crate) fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.end <= self.cols);
        Self { data: &self.data[columns.start * self.col_stride..], cols: columns.len(), ..self }
    }

    /// The transposed view.
    pub(crate) fn t(self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    /// The elements, the shape, and the strides.
    pub(crate) fn parts(self) -> (&'a [T], [usize; 2], [usize; 2]) {
        (self.data, [self.rows, self.cols], [self.row_stride, self.col_stride])
    }
}

impl<T: Copy> Mat<'_, T> {
    /// A contiguous copy in `into`; not for transposed views.
    ///
    /// Rows of a head are usually a power of two apart, so they share few cache sets. A tile that reads them
    /// repeatedly copies them once.
    pub(crate) fn gather<'b>(self, into: &'b mut [T]) -> Mat<'b, T> {
        let Self { data, rows, cols, row_stride, .. } = self;
        copy_rows(data, row_stride, into, cols, [rows, cols]);
        Mat::new(into, rows, cols, cols)
    }
}

impl<T: Float> Mat<'_, T> {
    /// As [`Self::gather`], in f32.
    pub(crate) fn gather_f32<'b>(self, into: &'b mut [f32]) -> Mat<'b> {
        let Self { data, rows, cols, row_stride, .. } = self;
        T::widen_rows(data, row_stride, into, cols, [rows, cols]);
        Mat::new(into, rows, cols, cols)
    }

    /// As [`Self::gather_f32`], transposed, with rows `stride` apart, a multiple of [`TILE`](crate::gemm::tile::TILE).
    pub(crate) fn gather_transposed<'b>(self, stride: usize, into: &'b mut [f32]) -> Mat<'b> {
        let Self { data, rows, cols, row_stride, .. } = self;
        transpose_rows(data, row_stride, into, stride, [rows, cols]);
        Mat::new(into, cols, rows, stride)
    }
}

/// A writable matrix with contiguous rows.
///
/// Not a slice, because several threads write interleaved rows of one tensor.
pub(crate) struct MatMut<'a, T = f32> {
    data: *mut T,
    rows: usize,
    cols: usize,
    row_stride: usize,
    _borrowed: PhantomData<&'a mut [T]>,
}

impl<'a, T> MatMut<'a, T> {
    /// Rows of `cols` elements, `row_stride` apart, from the start of `data`.
    pub(crate) fn new(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(fits(data.len(), rows, cols, row_stride), "matrix exceeds its slice");
        Self { data: data.as_mut_ptr(), rows, cols, row_stride, _borrowed: PhantomData }
    }

    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows);
        // SAFETY: the view's rows are in bounds, and exclusive while it lives.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.row_stride), self.cols) }
    }

    /// Checks that the matrix has the shape of `lhs * rhs`.
    pub(crate) fn expect_matmul<U>(&self, lhs: &Mat<'_, U>, rhs: &Mat<'_, U>) {
        assert_eq!((self.rows, self.cols, lhs.cols), (lhs.rows, rhs.cols, rhs.rows));
    }
}

impl<T: Float> MatMut<'_, T> {
    /// Overwrites the matrix with contiguous values, rounded.
    pub(crate) fn round_from(&mut self, values: &[f32]) {
        for (index, values) in values.chunks(self.cols).take(self.rows).enumerate() {
            T::round(values, self.row(index));
        }
    }
}

impl MatMut<'_> {
    pub(crate) fn fill(&mut self, value: f32) {
        for row in 0..self.rows {
            self.row(row).fill(value);
        }
    }
}

fn fits(len: usize, rows: usize, cols: usize, row_stride: usize) -> bool {
    cols <= row_stride && (rows == 0 || (rows - 1) * row_stride + cols <= len)
}

/// Whether a matmul overwrites its destination or adds to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Store {
    Overwrite,
    Add,
}

/// Computes `dst (+)= factor * lhs * rhs` on the calling thread.
pub(crate) fn multiply_f32(dst: MatMut<'_>, store: Store, factor: f32, lhs: Mat<'_>, rhs: Mat<'_>) {
    let matmul = matmul_of(&dst, store, factor, lhs, rhs);
    // SAFETY: see `matmul_of`.
    unsafe { multiply(matmul) }
}

/// As [`multiply_f32`], for operands with two bf16 terms per element.
pub(crate) fn multiply_words(
    dst: MatMut<'_>,
    store: Store,
    factor: f32,
    lhs: Mat<'_, u32>,
    rhs: Mat<'_, u32>,
) {
    let matmul = matmul_of(&dst, store, factor, lhs, rhs);
    // SAFETY: see `matmul_of`.
    unsafe { multiply_pairs(matmul) }
}

/// A matmul that may run as long as the views live: they are in bounds of live slices (checked on
/// construction), the shapes match, and `dst` has exclusive access to its elements.
fn matmul_of<T>(dst: &MatMut<'_>, store: Store, factor: f32, lhs: Mat<'_, T>, rhs: Mat<'_, T>) -> Matmul<T> {
    dst.expect_matmul(&lhs, &rhs);
    assert_eq!(rhs.col_stride, 1, "rows of the right operand are read as vectors");
    Matmul {
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
    }
}

/// A head of a sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadAt {
    pub(crate) sequence: usize,
    pub(crate) head: usize,
}

impl HeadAt {
    /// The head at an index into `[batch, heads]`.
    pub(crate) fn new(index: usize, num_heads: usize) -> Self {
        Self { sequence: index / num_heads, head: index % num_heads }
    }
}

/// A tensor `[batch, tokens, heads, head_dim]` to read.
#[derive(Clone, Copy)]
pub(crate) struct Heads<'a, T = f32> {
    data: &'a [T],
    tokens: usize,
    heads: usize,
    head_dim: usize,
}

impl<'a, T: Copy> Heads<'a, T> {
    pub(crate) fn new(data: &'a [T], tokens: usize, heads: usize, head_dim: usize) -> Self {
        Self { data, tokens, heads, head_dim }
    }

    pub(crate) fn num_tokens(&self) -> usize {
        self.tokens
    }

    pub(crate) fn num_heads(&self) -> usize {
        self.heads
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// One head of a sequence, from its first element on, with rows of `head_dim` [`Self::row_stride`] apart.
    pub(crate) fn head_slice(&self, HeadAt { sequence, head }: HeadAt) -> &'a [T] {
        &self.data[(sequence * self.tokens * self.heads + head) * self.head_dim..]
    }

    /// Distance between two tokens of a head.
    pub(crate) fn row_stride(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Some tokens of one head, `[tokens, head_dim]`.
    pub(crate) fn head(&self, at: HeadAt, tokens: &Range<usize>) -> Mat<'a, T> {
        let HeadAt { sequence, head } = at;
        assert!(head < self.heads && tokens.end <= self.tokens);
        let start = ((sequence * self.tokens + tokens.start) * self.heads + head) * self.head_dim;
        Mat::new(&self.data[start..], tokens.len(), self.head_dim, self.row_stride())
    }
}

impl<'a, T: Float> Heads<'a, T> {
    /// A copy of [`Self::head`] in f32; see [`Mat::gather`].
    pub(crate) fn gather_f32<'b>(&self, at: HeadAt, tokens: &Range<usize>, into: &'b mut [f32]) -> Mat<'b> {
        self.head(at, tokens).gather_f32(into)
    }

    /// The same tensor, if its elements are f32.
    pub(crate) fn as_f32(&self) -> Option<Heads<'a>> {
        let Self { data, tokens, heads, head_dim } = *self;
        T::as_f32(data).map(|data| Heads { data, tokens, heads, head_dim })
    }
}

/// A tensor `[batch, tokens, heads, head_dim]` in which each thread writes its own heads and tokens.
pub(crate) struct HeadsMut<'a, T = f32> {
    data: *mut T,
    len: usize,
    tokens: usize,
    heads: usize,
    head_dim: usize,
    _borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: elements are accessed only through `head`, whose callers guarantee that they do not overlap.
unsafe impl<T: Send> Sync for HeadsMut<'_, T> {}

impl<'a, T> HeadsMut<'a, T> {
    pub(crate) fn new(data: &'a mut [T], tokens: usize, heads: usize, head_dim: usize) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), tokens, heads, head_dim, _borrowed: PhantomData }
    }

    /// Some tokens of one head, `[tokens, head_dim]`.
    ///
    /// # Safety
    /// While the view lives, no other view of the same sequence and head may share a token with it.
    pub(crate) unsafe fn head(&self, at: HeadAt, tokens: &Range<usize>) -> MatMut<'_, T> {
        let HeadAt { sequence, head } = at;
        assert!(head < self.heads && tokens.end <= self.tokens);
        let row_stride = self.heads * self.head_dim;
        let start = ((sequence * self.tokens + tokens.start) * self.heads + head) * self.head_dim;
        assert!(start <= self.len && fits(self.len - start, tokens.len(), self.head_dim, row_stride));
        // SAFETY: in bounds, as just checked.
        let data = unsafe { self.data.add(start) };
        MatMut { data, rows: tokens.len(), cols: self.head_dim, row_stride, _borrowed: PhantomData }
    }
}
