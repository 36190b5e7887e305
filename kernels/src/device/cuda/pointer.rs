//! Addresses of storages on the GPU.

use crate::device::DeviceError;
use candle_core::CudaStorage;
use candle_core::cuda::CudaStorageSlice;
use candle_core::cuda::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

/// Runs `$body` with `$slice` as the storage's elements.
macro_rules! for_slice {
    ($storage:expr, $slice:ident => $body:expr) => {
        match $storage {
            CudaStorageSlice::F32($slice) => $body,
            CudaStorageSlice::F64($slice) => $body,
            CudaStorageSlice::BF16($slice) => $body,
            CudaStorageSlice::F16($slice) => $body,
            CudaStorageSlice::U32($slice) => $body,
            CudaStorageSlice::I64($slice) => $body,
            CudaStorageSlice::U8($slice) => $body,
            _ => Err(DeviceError::Candle(candle_core::Error::Msg(
                "kernels do not support this element type".to_owned(),
            ))),
        }
    };
}

/// Calls `run` with the address of a storage that is read on `stream`.
pub(in crate::device) fn with_pointer<R>(
    storage: &CudaStorage,
    stream: &CudaStream,
    run: impl FnOnce(u64) -> Result<R, DeviceError>,
) -> Result<R, DeviceError> {
    for_slice!(&storage.slice, slice => {
        // The guard records the read when it is dropped, after the launches of `run`.
        let (pointer, _recorded) = slice.device_ptr(stream);
        run(pointer)
    })
}

/// As [`with_pointer`], for a storage that is written.
pub(in crate::device) fn with_pointer_mut<R>(
    storage: &mut CudaStorage,
    stream: &CudaStream,
    run: impl FnOnce(u64) -> Result<R, DeviceError>,
) -> Result<R, DeviceError> {
    for_slice!(&mut storage.slice, slice => {
        let (pointer, _recorded) = slice.device_ptr_mut(stream);
        run(pointer)
    })
}

/// Number of elements of a whole storage; 0 for an element type without kernels.
pub(crate) fn elements(storage: &CudaStorage) -> usize {
    for_slice!(&storage.slice, slice => Ok(slice.len())).unwrap_or(0)
}
