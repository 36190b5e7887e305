//! Whole tensors as buffers.

use super::CommError;
use candle_core::Tensor;
use ulysses_kernels::strided_copy;
use ulysses_kernels::tensor::zeros;

pub(super) use ulysses_kernels::tensor::StorageId;

/// Returns a copy of a contiguous tensor, on its device and in its own storage.
pub(super) fn copy_of(tensor: &Tensor) -> Result<Tensor, CommError> {
    match tensor.elem_count() {
        // CUDA cannot allocate zero bytes.
        0 => Ok(zeros(tensor.shape(), tensor.dtype(), tensor.device())?),
        _ => Ok(tensor.force_contiguous()?),
    }
}

/// Overwrites `target` with `source`; both are contiguous, of the same dtype and length, and
/// in different storages.
pub(super) fn copy_into(source: &Tensor, target: &Tensor) -> Result<(), CommError> {
    Ok(strided_copy::copy(source, target)?)
}

/// Returns `input`, or a copy of it if it shares storage with an output of its call.
pub(super) fn copy_if_shared(input: &Tensor, outputs: &[Tensor]) -> Result<Tensor, CommError> {
    let is_written = outputs.iter().any(|output| StorageId::of(output) == StorageId::of(input));
    if is_written { copy_of(input) } else { Ok(input.clone()) }
}
