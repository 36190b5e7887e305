//! Addresses of CPU tensors for MPI.

use crate::comm::CommError;
use candle_core::Tensor;
use ulysses_kernels::for_dtype;
use ulysses_kernels::tensor::{with_slice, with_slice_mut};

/// Returns the address of a contiguous CPU tensor, for reading its bytes. Valid while the
/// tensor's storage lives: candle never moves it.
pub(super) fn source(tensor: &Tensor) -> Result<*const u8, CommError> {
    let pointer: candle_core::Result<*const u8> = for_dtype!(tensor.dtype(), T => {
        with_slice::<T, _>(tensor, |elements| elements.as_ptr().cast())
    }, else Err(unknown(tensor)));
    Ok(pointer?)
}

/// As [`source`], for writing.
pub(super) fn target(tensor: &Tensor) -> Result<*mut u8, CommError> {
    let pointer: candle_core::Result<*mut u8> = for_dtype!(tensor.dtype(), T => {
        with_slice_mut::<T, _>(tensor, |elements| elements.as_mut_ptr().cast())
    }, else Err(unknown(tensor)));
    Ok(pointer?)
}

fn unknown(tensor: &Tensor) -> candle_core::Error {
    candle_core::Error::Msg(format!("MPI does not support {:?}", tensor.dtype()))
}
