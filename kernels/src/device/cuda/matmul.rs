//! Matmuls with cuBLAS, accumulated in f32.

use crate::device::{DeviceError, Matmul, MatrixAt};
use candle_core::cuda::cudarc::cublas::{result, sys};
use candle_core::{CudaDevice, DType};

/// Starts a batch of matmuls on the device's stream.
///
/// cuBLAS is column-major: to it, a row-major c = a·b is cᵀ = bᵀ·aᵀ in the same memory.
///
/// # Safety
/// As [`Launcher::gemm`](crate::device::Launcher::gemm).
pub(in crate::device) unsafe fn gemm(device: &CudaDevice, matmul: &Matmul) -> Result<(), DeviceError> {
    let Matmul { alpha, a, b, beta, c, batch } = matmul;
    let error = |message: String| DeviceError::Matmul { a: [a.rows, a.cols], b: [b.rows, b.cols], message };
    let blas = device.cublas_handle();
    let stream = device.cuda_stream();
    stream.context().bind_to_thread().map_err(|failure| error(failure.to_string()))?;
    let (left, right) = (operand(b).map_err(error)?, operand(a).map_err(error)?);
    let result = operand(c).map_err(error)?;
    let [m, n, k, batch] = sizes([c.cols, c.rows, a.cols, *batch]).map_err(error)?;
    // SAFETY: the caller guarantees that sizes, strides and element types match the matrices; the handle
    // belongs to the device's stream.
    unsafe {
        let handle = *blas.handle();
        let mode = sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
        sys::cublasSetMathMode(handle, mode).result().map_err(|failure| error(failure.to_string()))?;
        result::gemm_strided_batched_ex(
            handle,
            left.operation,
            right.operation,
            m,
            n,
            k,
            (&raw const *alpha).cast(),
            b.address.as_u64() as *const _,
            left.dtype,
            left.leading,
            b.batch_stride as i64,
            a.address.as_u64() as *const _,
            right.dtype,
            right.leading,
            a.batch_stride as i64,
            (&raw const *beta).cast(),
            c.address.as_u64() as *mut _,
            result.dtype,
            result.leading,
            c.batch_stride as i64,
            batch,
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
        )
    }
    .map_err(|failure| error(failure.to_string()))
}

/// A matrix in cuBLAS's terms.
struct Operand {
    operation: sys::cublasOperation_t,
    leading: i32,
    dtype: sys::cudaDataType,
}

fn operand(matrix: &MatrixAt) -> Result<Operand, String> {
    let MatrixAt { address, rows, cols, row_stride, col_stride, .. } = *matrix;
    let dtype = match address.dtype() {
        DType::F32 => sys::cudaDataType::CUDA_R_32F,
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        other => return Err(format!("cuBLAS does not multiply {other:?}")),
    };
    let (operation, leading) = if col_stride == 1 {
        (sys::cublasOperation_t::CUBLAS_OP_N, row_stride.max(cols))
    } else if row_stride == 1 {
        (sys::cublasOperation_t::CUBLAS_OP_T, col_stride.max(rows))
    } else {
        return Err(format!("neither of the strides {row_stride} and {col_stride} is 1"));
    };
    let [leading] = sizes([leading.max(1)])?;
    Ok(Operand { operation, leading, dtype })
}

fn sizes<const N: usize>(sizes: [usize; N]) -> Result<[i32; N], String> {
    match sizes.iter().find(|size| **size > i32::MAX as usize) {
        Some(size) => Err(format!("cuBLAS sizes are limited to 2³¹ − 1, got {size}")),
        None => Ok(sizes.map(|size| size as i32)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Address;

    #[test]
    fn a_matrix_that_cublas_does_not_support_is_refused_with_the_reason() {
        let refused = |dtype, row_stride, col_stride| {
            let matrix = MatrixAt::row_major(Address::null(dtype), 4, 4, 4);
            operand(&MatrixAt { row_stride, col_stride, ..matrix }).err()
        };
        assert_eq!(refused(DType::F32, 4, 1), None);
        assert_eq!(refused(DType::BF16, 1, 4), None);
        assert_eq!(refused(DType::F64, 4, 1).as_deref(), Some("cuBLAS does not multiply F64"));
        let strided = refused(DType::F32, 8, 2);
        assert_eq!(strided.as_deref(), Some("neither of the strides 8 and 2 is 1"));
        let large = refused(DType::F32, 1 << 31, 1);
        assert_eq!(large.as_deref(), Some("cuBLAS sizes are limited to 2³¹ − 1, got 2147483648"));
    }
}
