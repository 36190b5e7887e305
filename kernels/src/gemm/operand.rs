//! Operands of matmuls that copy their elements first.

use crate::OpError;
use crate::cast::Float;
use half::bf16;

/// A matrix of lines by terms. Lines are the rows of a left operand or the columns of a right one (the m or n
/// dimension); terms are the summed (k) dimension. One of the strides is 1.
#[derive(Clone, Copy)]
pub(crate) struct MatmulOperand<'a, T> {
    pub(super) data: &'a [T],
    pub(super) lines: usize,
    pub(super) terms: usize,
    pub(super) line_stride: usize,
    pub(super) term_stride: usize,
}

impl<'a, T> MatmulOperand<'a, T> {
    /// Lines one after another in `data`.
    ///
    /// # Errors
    /// If `data` has another length.
    pub(crate) fn contiguous(data: &'a [T], lines: usize, terms: usize) -> Result<Self, OpError> {
        Self { data, lines, terms, line_stride: terms, term_stride: 1 }.checked()
    }

    /// The first term of all lines, then the second, and so on.
    ///
    /// # Errors
    /// As [`contiguous`](Self::contiguous).
    pub(crate) fn interleaved(data: &'a [T], lines: usize, terms: usize) -> Result<Self, OpError> {
        Self { data, lines, terms, line_stride: 1, term_stride: lines }.checked()
    }

    /// Lines with adjacent terms, or terms with adjacent lines: one of the strides is 1.
    ///
    /// # Errors
    /// If neither stride is 1, or an element would be outside of `data`.
    pub(crate) fn strided(
        data: &'a [T],
        [lines, terms]: [usize; 2],
        [line_stride, term_stride]: [usize; 2],
    ) -> Result<Self, OpError> {
        let matrix = Self { data, lines, terms, line_stride, term_stride };
        let last = || {
            let line = (lines - 1).checked_mul(line_stride)?;
            line.checked_add((terms - 1).checked_mul(term_stride)?)
        };
        let fits = lines == 0 || terms == 0 || last().is_some_and(|last| last < data.len());
        if fits && (line_stride == 1 || term_stride == 1) { Ok(matrix) } else { Err(matrix.layout_error()) }
    }

    fn checked(self) -> Result<Self, OpError> {
        let fits = Some(self.data.len()) == self.lines.checked_mul(self.terms);
        if fits { Ok(self) } else { Err(self.layout_error()) }
    }

    fn layout_error(&self) -> OpError {
        let Self { data, lines: rows, terms: cols, line_stride: row_stride, term_stride: col_stride, .. } =
            *self;
        OpError::MatrixLayout { rows, cols, row_stride, col_stride, len: data.len() }
    }

    /// A range of the terms.
    pub(super) fn terms(self, first: usize, count: usize) -> Self {
        let data = self.data.get(first * self.term_stride..).unwrap_or_default();
        Self { data, terms: count.min(self.terms - first), ..self }
    }

    /// A range of the lines.
    pub(super) fn lines(self, first: usize, count: usize) -> Self {
        let data = self.data.get(first * self.line_stride..).unwrap_or_default();
        Self { data, lines: count.min(self.lines - first), ..self }
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
        let Self { lines, terms, line_stride, term_stride, .. } = *self;
        MatmulOperand { data, lines, terms, line_stride, term_stride }
    }
}
