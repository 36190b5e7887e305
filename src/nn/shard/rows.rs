//! Copies of rows between `[batch, rows, …]` tensors.

use crate::nn::LayerError;
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::strided_copy::{BlockCopy, StridedBlock, copy_blocks};

/// Some rows of every sequence of a `[batch, rows, …]` tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    batch: usize,
    /// Rows of each sequence of the tensor.
    all: usize,
    /// Elements of a row.
    width: usize,
    first: usize,
    len: usize,
}

impl Rows {
    /// `len` rows from `first` on.
    pub(super) fn new(tensor: &Tensor, first: usize, len: usize) -> Self {
        let (batch, all) = (tensor.dims()[0], tensor.dims()[1]);
        Self { batch, all, width: tensor.dims()[2..].iter().product(), first, len }
    }

    /// Their number.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The rows as a block of the tensor with this index.
    pub(super) fn block(&self, tensor: usize) -> StridedBlock {
        let Self { batch, all, width, first, len } = *self;
        StridedBlock {
            tensor,
            offset: first * width,
            batch,
            batch_stride: all * width,
            rows: 1,
            row_stride: 0,
            run: len * width,
        }
    }

    /// The diagonal of each head's columns from column `first` on, as long as there are rows.
    pub(super) fn diagonals(&self, heads: usize, first: usize) -> Vec<StridedBlock> {
        let diagonal = |block: StridedBlock| StridedBlock { row_stride: block.row_stride + 1, ..block };
        self.matrices(heads, first..first + 1).into_iter().map(diagonal).collect()
    }

    /// Some columns of each head: a matrix per head of each sequence, with a row for each of these rows.
    pub(super) fn matrices(&self, heads: usize, columns: Range<usize>) -> Vec<StridedBlock> {
        let Self { batch, all, width, first, len } = *self;
        let matrix = |head: usize| StridedBlock {
            tensor: 0,
            offset: first * width + head * (width / heads) + columns.start,
            batch,
            batch_stride: all * width,
            rows: len,
            row_stride: width,
            run: columns.len(),
        };
        (0..heads).map(matrix).collect()
    }
}

/// Copies rows of one tensor to as many of another, of the same width.
pub(super) fn copy_rows(from: (&Tensor, Rows), to: (&Tensor, Rows)) -> Result<(), LayerError> {
    let copy = BlockCopy { from: from.1.block(0), to: to.1.block(0), accumulate: false };
    Ok(copy_blocks(&[from.0], &[to.0], &[copy])?)
}
