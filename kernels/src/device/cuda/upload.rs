//! Asynchronous copies from the host to a GPU.
//!
//! From pageable memory the driver copies when the GPU reaches the copy, and may block the host until then.
//! So data is first copied to page-locked memory.

use super::{no_page_locked, with_pointer_mut};
use crate::device::DeviceError;
use crate::device::gpus::explain_allocation;
use crate::device::staging::{Buffer, Staging};
use candle_core::backend::BackendDevice;
use candle_core::cuda::cudarc::driver::{CudaEvent, CudaStream, HostSlice, PinnedHostSlice, result};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, Device, Shape, Storage, Tensor, WithDType};
use std::sync::Arc;

/// The staging buffers for all GPUs of the process.
static STAGING: Staging<PageLocked> = Staging::new();

/// Minimum size of a buffer.
const MIN_BYTES: usize = 4096;

/// Creates a flat tensor of these elements, at least one.
pub(crate) fn upload<T: WithDType>(elements: &[T], device: &CudaDevice) -> candle_core::Result<Tensor> {
    let shape = Shape::from(elements.len());
    // SAFETY: the copy writes every element, and all use of the tensor follows it on the device's stream.
    let mut storage = unsafe { device.alloc_uninit(&shape, T::DTYPE) }
        .map_err(|error| explain_allocation(error, size_of_val(elements), &Device::Cuda(device.clone())))?;
    // SAFETY: candle's element types are plain numbers without padding.
    let bytes = unsafe {
        std::slice::from_raw_parts(elements.as_ptr().cast::<u8>(), std::mem::size_of_val(elements))
    };
    let stream = device.cuda_stream();
    with_pointer_mut(&mut storage, &stream, |pointer| copy(bytes, pointer, &stream))
        .map_err(candle_core::Error::wrap)?;
    Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
}

/// Starts the copy of `bytes` to `pointer`, which has room for them.
fn copy(bytes: &[u8], pointer: u64, stream: &Arc<CudaStream>) -> Result<(), DeviceError> {
    let failed = |failure| DeviceError::Candle(candle_core::Error::wrap(failure));
    // Where buffers are asked whether they are idle, the context is this thread's.
    stream.context().bind_to_thread().map_err(failed)?;
    let make = || PageLocked::new(bytes.len(), stream);
    let found = STAGING.acquire(stream.context().ordinal(), bytes.len(), make);
    let mut buffer = found.map_err(no_page_locked(bytes.len()))?;
    buffer.memory.as_mut_slice().map_err(failed)?[..bytes.len()].copy_from_slice(bytes);
    {
        // SAFETY: the slice is used on the stream alone. The guard records that on its way out, and the memory is
        // not freed before.
        let (staged, _recorded) = unsafe { buffer.memory.stream_synced_slice(stream) };
        // SAFETY: the caller has room for the bytes; they are not overwritten while the copy is in progress.
        unsafe { result::memcpy_htod_async(pointer, &staged[..bytes.len()], stream.cu_stream()) }
            .map_err(failed)?;
    }
    buffer.copied.record(stream).map_err(failed)?;
    STAGING.release(buffer);
    Ok(())
}

/// Page-locked memory of the host.
struct PageLocked {
    memory: PinnedHostSlice<u8>,
    /// After the copy from it.
    copied: CudaEvent,
}

impl PageLocked {
    fn new(
        bytes: usize,
        stream: &CudaStream,
    ) -> Result<Self, candle_core::cuda::cudarc::driver::DriverError> {
        let context = stream.context();
        let capacity = bytes.next_power_of_two().max(MIN_BYTES);
        // SAFETY: bytes, of which none is read before it was written.
        let memory = unsafe { context.alloc_pinned(capacity)? };
        Ok(Self { memory, copied: context.new_event(None)? })
    }
}

impl Buffer for PageLocked {
    fn suits(&self, gpu: usize, bytes: usize) -> bool {
        let capacity = self.memory.len();
        self.memory.context().ordinal() == gpu && bytes <= capacity && capacity <= bytes.max(MIN_BYTES) * 4
    }

    fn is_idle(&self) -> bool {
        self.copied.is_complete()
    }
}
