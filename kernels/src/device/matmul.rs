//! Matmuls by address.

use super::Address;

/// A matrix, or a batch of equally spaced ones. One of its strides is 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatrixAt {
    /// Element (0, 0) of the first matrix.
    pub(crate) address: Address,
    /// Rows.
    pub(crate) rows: usize,
    /// Columns.
    pub(crate) cols: usize,
    /// Distance between rows, in elements.
    pub(crate) row_stride: usize,
    /// Distance between columns, in elements.
    pub(crate) col_stride: usize,
    /// Distance between matrices, in elements; 0 if all matmuls read the same one.
    pub(crate) batch_stride: usize,
}

impl MatrixAt {
    /// A row-major matrix with rows `row_stride` elements apart.
    pub(crate) fn row_major(address: Address, rows: usize, cols: usize, row_stride: usize) -> Self {
        Self { address, rows, cols, row_stride, col_stride: 1, batch_stride: 0 }
    }

    /// The same elements with rows and columns exchanged.
    #[must_use]
    pub(crate) fn transposed(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// A batch of matrices, `batch_stride` elements apart.
    #[must_use]
    pub(crate) fn batched(self, batch_stride: usize) -> Self {
        Self { batch_stride, ..self }
    }
}

/// c = alpha · a·b + beta · c, for each of a batch; accumulated in f32.
///
/// `a` and `b` have the same element type (f32, bf16 or f16); `c` has that type or f32. With `beta` 0, `c` is
/// not read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matmul {
    /// Factor of the product a·b.
    pub(crate) alpha: f32,
    /// [m, k].
    pub(crate) a: MatrixAt,
    /// [k, n].
    pub(crate) b: MatrixAt,
    /// Factor of the old content of `c`.
    pub(crate) beta: f32,
    /// [m, n], row-major.
    pub(crate) c: MatrixAt,
    /// Number of matmuls.
    pub(crate) batch: usize,
}
