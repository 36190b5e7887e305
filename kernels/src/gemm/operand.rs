//! Operands of matmuls that copy their elements first.

use crate::OpError;
use crate::cast::Float;
use half::bf16;

/// A matrix `[rows, k]`: the left operand of a matmul (m rows), or the transpose of the right one (n rows). The matmul
/// sums over k. One of the strides is 1.
#[derive(Clone, Copy)]
pub(crate) struct MatmulOperand<'a, T> {
    pub(super) data: &'a [T],
    pub(super) rows: usize,
    pub(super) k: usize,
    pub(super) row_stride: usize,
    pub(super) k_stride: usize,
}

impl<'a, T> MatmulOperand<'a, T> {
    /// Row-major.
    ///
    /// # Errors
    /// If `data` has another length.
    pub(crate) fn contiguous(data: &'a [T], rows: usize, k: usize) -> Result<Self, OpError> {
        Self { data, rows, k, row_stride: k, k_stride: 1 }.checked()
    }

    /// Column-major: the first element of every row, then the second, and so on.
    ///
    /// # Errors
    /// As [`contiguous`](Self::contiguous).
    pub(crate) fn interleaved(data: &'a [T], rows: usize, k: usize) -> Result<Self, OpError> {
        Self { data, rows, k, row_stride: 1, k_stride: rows }.checked()
    }

    /// Rows `row_stride` apart, elements of a row `k_stride` apart; one of the strides is 1.
    ///
    /// # Errors
    /// If neither stride is 1, or an element would be outside of `data`.
    pub(crate) fn strided(
        data: &'a [T],
        [rows, k]: [usize; 2],
        [row_stride, k_stride]: [usize; 2],
    ) -> Result<Self, OpError> {
        let matrix = Self { data, rows, k, row_stride, k_stride };
        let last = || {
            let row = (rows - 1).checked_mul(row_stride)?;
            row.checked_add((k - 1).checked_mul(k_stride)?)
        };
        let fits = rows == 0 || k == 0 || last().is_some_and(|last| last < data.len());
        if fits && (row_stride == 1 || k_stride == 1) { Ok(matrix) } else { Err(matrix.layout_error()) }
    }

    fn checked(self) -> Result<Self, OpError> {
        let fits = Some(self.data.len()) == self.rows.checked_mul(self.k);
        if fits { Ok(self) } else { Err(self.layout_error()) }
    }

    fn layout_error(&self) -> OpError {
        let Self { data, rows, k: cols, row_stride, k_stride: col_stride } = *self;
        OpError::MatrixLayout { rows, cols, row_stride, col_stride, len: data.len() }
    }

    /// `count` columns (fewer at the end) from `first` on.
    pub(super) fn k_range(self, first: usize, count: usize) -> Self {
        let data = self.data.get(first * self.k_stride..).unwrap_or_default();
        Self { data, k: count.min(self.k - first), ..self }
    }

    /// `count` rows (fewer at the end) from `first` on.
    pub(super) fn row_range(self, first: usize, count: usize) -> Self {
        let data = self.data.get(first * self.row_stride..).unwrap_or_default();
        Self { data, rows: count.min(self.rows - first), ..self }
    }
}

impl<'a, T: Float> MatmulOperand<'a, T> {
    /// The same operand, if its elements are f32.
    pub(super) fn as_f32(&self) -> Option<MatmulOperand<'a, f32>> {
        T::as_f32(self.data).map(|data| self.with(data))
    }

    /// The same operand, if its elements are bf16.
    pub(super) fn as_bf16(&self) -> Option<MatmulOperand<'a, bf16>> {
        T::as_bf16(self.data).map(|data| self.with(data))
    }

    fn with<U>(&self, data: &'a [U]) -> MatmulOperand<'a, U> {
        let Self { rows, k, row_stride, k_stride, .. } = *self;
        MatmulOperand { data, rows, k, row_stride, k_stride }
    }
}
