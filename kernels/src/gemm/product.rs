//! Products of matrices of any element types, each in the way that is fastest on this processor.

use super::bf16::{self, Stored, kernel_for, packed_bytes_of_threads};
use super::operand::MatmulOperand;
use super::{MatrixMut, MatrixRef, Threads, gemm, widened};
use crate::OpError;
use crate::cast::Float;
use candle_core::DType;

/// `c = a·b`, or `c += a·b` with `add`, all sums in f32. Lines of `a` are its rows, lines of `b` its columns.
///
/// # Shapes
/// `a: [m, k], b: [k, n], c: [m, n]` row-major without gaps
///
/// # Errors
/// When the shapes do not fit together.
pub(crate) fn multiply<A: Float, B: Float, C: Stored>(
    a: MatmulOperand<'_, A>,
    b: MatmulOperand<'_, B>,
    c: &mut [C],
    add: bool,
) -> Result<(), OpError> {
    let (m, n) = (a.lines, b.lines);
    if (a.terms, m.checked_mul(n)) != (b.terms, Some(c.len())) {
        let (expected, got) = (vec![a.terms, n], vec![b.terms, c.len() / m.max(1)]);
        return Err(OpError::Shape { op: "gemm", argument: "b", expected, got });
    }
    if let (Some(a), Some(b)) = (a.as_f32(), b.as_f32())
        && let Some(c) = C::as_f32_mut(c)
    {
        let (a, b, c) = (matrix_of(a)?, matrix_of(b)?.transposed(), MatrixMut::new(c, m, n)?);
        return gemm(1.0, a, b, if add { 1.0 } else { 0.0 }, c, Threads::Pool);
    }
    match (a.as_bf16(), b.as_bf16(), kernel_for([m, n, a.terms])) {
        (Some(a), Some(b), Some(kernel)) => bf16::multiply(kernel, a, b, c, add),
        _ => widened::multiply(a, b, c, add),
    }
    Ok(())
}

/// With lines as rows.
fn matrix_of(lines: MatmulOperand<'_, f32>) -> Result<MatrixRef<'_>, OpError> {
    let MatmulOperand { data, lines, terms, line_stride, term_stride } = lines;
    MatrixRef::strided(data, lines, terms, line_stride, term_stride)
}

/// What a product needs in memory beside its operands and its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductMemory {
    /// What the gemm crate packs, while it runs.
    Panels,
    /// So many bytes of packed bf16 elements, which the threads keep.
    Packed(usize),
    /// So many bytes of f32 copies and sums, which the threads keep.
    Copied(usize),
}

impl ProductMemory {
    /// Of [`multiply`] with elements of these types.
    pub(crate) fn of([a, b, c]: [DType; 3], [m, n, k]: [usize; 3], threads: usize) -> Self {
        if [a, b, c] == [DType::F32; 3] {
            return Self::Panels;
        }
        if [a, b] == [DType::BF16; 2] && kernel_for([m, n, k]).is_some() {
            return Self::Packed(packed_bytes_of_threads([m, n, k], c == DType::F32, threads));
        }
        Self::Copied(widened::kept_bytes([m, n, k], threads))
    }
}
