//! Copies of rows between `[batch, rows, …]` tensors.

use crate::nn::LayerError;
use crate::nn::columns::copy;
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::strided_copy::{StridedBlock, copy_blocks};

/// Some rows of every sequence of a `[batch, rows, …]` tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    tensor: &'a Tensor,
    first: usize,
    len: usize,
}

impl<'a> Rows<'a> {
    /// `len` rows from `first` on.
    pub(super) fn new(tensor: &'a Tensor, first: usize, len: usize) -> Self {
        Self { tensor, first, len }
    }

    /// Their number.
    pub(super) fn len(self) -> usize {
        self.len
    }

    /// Elements of a row.
    fn width(self) -> usize {
        self.tensor.dims()[2..].iter().product()
    }

    /// The rows as a block of the tensor, which is the one with this index.
    pub(super) fn block(self, tensor: usize) -> StridedBlock {
        let width = self.width();
        StridedBlock {
            tensor,
            offset: self.first * width,
            batch: self.tensor.dims()[0],
            batch_stride: self.tensor.dims()[1] * width,
            rows: 1,
            row_stride: 0,
            run: self.len * width,
        }
    }

    /// The diagonal of each head's columns from column `first` on, as long as there are rows.
    pub(super) fn diagonals(self, heads: usize, first: usize) -> Vec<StridedBlock> {
        let diagonal = |block: StridedBlock| StridedBlock { row_stride: block.row_stride + 1, ..block };
        self.matrices(heads, first..first + 1).into_iter().map(diagonal).collect()
    }

    /// Some columns of each head: a matrix per head of each sequence, with a row for each of these rows.
    pub(super) fn matrices(self, heads: usize, columns: Range<usize>) -> Vec<StridedBlock> {
        let (rows, width) = (self.block(0), self.width());
        let matrix = |head: usize| StridedBlock {
            offset: rows.offset + head * (width / heads) + columns.start,
            rows: self.len,
            row_stride: width,
            run: columns.len(),
            ..rows.clone()
        };
        (0..heads).map(matrix).collect()
    }

    /// Copies the rows over as many of another tensor, of the same width.
    pub(super) fn copy_to(self, to: Rows<'_>) -> Result<(), LayerError> {
        Ok(copy_blocks(&[self.tensor], &[to.tensor], &[copy(self.block(0), to.block(0))])?)
    }
}
