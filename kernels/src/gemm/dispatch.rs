//! Selects the fastest matmul on this CPU for matrices of any element types.

use super::bf16::{self, Stored, kernel_for, packed_bytes_of_threads};
use super::operand::MatmulOperand;
use super::{MatrixMut, MatrixRef, Threads, gemm, widened};
use crate::OpError;
use crate::cast::Float;
use crate::device::dry::DryCpu;
use candle_core::DType;
use gemm_common::cache::CACHE_INFO;

/// Computes `c = a·b`, or `c += a·b` with `add`, with f32 sums. `b` is given transposed.
///
/// # Shapes
/// `a: [m, k], b: [n, k], c: [m, n]` row-major without gaps
///
/// # Errors
/// Shapes that do not match.
pub(crate) fn multiply<A: Float, B: Float, C: Stored>(
    a: MatmulOperand<'_, A>,
    b: MatmulOperand<'_, B>,
    c: &mut [C],
    add: bool,
) -> Result<(), OpError> {
    let (m, n) = (a.rows, b.rows);
    if (a.k, m.checked_mul(n)) != (b.k, Some(c.len())) {
        let (expected, got) = (vec![a.k, n], vec![b.k, c.len() / m.max(1)]);
        return Err(OpError::Shape { op: "gemm", argument: "b", expected, got });
    }
    if let (Some(a), Some(b)) = (a.as_f32(), b.as_f32())
        && let Some(c) = C::as_f32_mut(c)
    {
        let (a, b, c) = (matrix_of(a)?, matrix_of(b)?.transposed(), MatrixMut::new(c, m, n)?);
        return gemm(1.0, a, b, if add { 1.0 } else { 0.0 }, c, Threads::Pool);
    }
    match (a.as_bf16(), b.as_bf16(), kernel_for([m, n, a.k])) {
        (Some(a), Some(b), Some(kernel)) => bf16::multiply(kernel, a, b, c, add),
        _ => widened::multiply(a, b, c, add),
    }
    Ok(())
}

/// The operand as a matrix `[rows, k]`.
fn matrix_of(operand: MatmulOperand<'_, f32>) -> Result<MatrixRef<'_>, OpError> {
    let MatmulOperand { data, rows, k, row_stride, k_stride } = operand;
    MatrixRef::strided(data, rows, k, row_stride, k_stride)
}

/// Part of k that the gemm crate sums at a time, and so the length of its packed pieces.
const PANEL_K: usize = 512;

/// Up to so many columns, the gemm crate packs the right operand at once: twice eight panels of 48.
const MAX_PACKED_COLUMNS: usize = 768;

/// Counts the scratch memory of [`multiply`] on a dry CPU, for these element types and `[m, k]` by `[k, n]`.
pub(crate) fn alloc_matmul_scratch(cpu: DryCpu, types: [DType; 3], [m, n, k]: [usize; 3]) {
    let packed = if n <= MAX_PACKED_COLUMNS { n } else { 0 };
    alloc_scratch(cpu, types, [m, n, k], packed);
}

/// The same if k counts tokens, whose elements are not adjacent in either operand.
pub(crate) fn alloc_token_sum_scratch(cpu: DryCpu, types: [DType; 3], [m, n, k]: [usize; 3]) {
    alloc_scratch(cpu, types, [m, n, k], m);
}

fn alloc_scratch(cpu: DryCpu, [a, b, c]: [DType; 3], [m, n, k]: [usize; 3], packed_rows: usize) {
    let threads = cpu.threads;
    if [a, b, c] == [DType::F32; 3] {
        // The gemm crate retains packed operands of the size of the second-level cache per thread.
        cpu.alloc_persistent("gemm panels", threads * CACHE_INFO[1].cache_bytes);
        cpu.alloc_temporary(k.min(PANEL_K) * packed_rows * size_of::<f32>());
    } else if [a, b] == [DType::BF16; 2] && kernel_for([m, n, k]).is_some() {
        cpu.alloc_persistent("packed bf16", packed_bytes_of_threads([m, n, k], c == DType::F32, threads));
    } else {
        cpu.alloc_persistent("widened copies", widened::scratch_bytes([m, n, k], threads));
    }
}
