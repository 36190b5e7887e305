//! Copies between a GPU and page-locked memory of the host, on streams of their own.
//!
//! Each direction has a stream: an update sends one unit's state away while the next one's comes. Uses of one block of
//! memory are ordered by the event that cudarc keeps with it. A copy starts after all that the device's stream was
//! given before; what that is given later goes on beside the copy, up to a [`HostCopies::hold`].

use crate::device::address::Opener;
use crate::device::{Address, DeviceError, HostCopies};
use candle_core::cuda::cudarc::driver::{
    CudaEvent, CudaStream, DriverError, HostSlice, PinnedHostSlice, result,
};
use candle_core::{CudaDevice, Tensor};
use std::sync::Arc;

/// The streams of a rank for one kind of what is offloaded.
#[derive(Debug)]
pub(crate) struct CudaCopies {
    device: CudaDevice,
    to_host: Arc<CudaStream>,
    to_device: Arc<CudaStream>,
}

impl CudaCopies {
    /// Beside the stream of `device`.
    ///
    /// # Errors
    /// A driver that refuses streams.
    pub(crate) fn new(device: &CudaDevice) -> Result<Self, DeviceError> {
        let stream = || device.cuda_stream().context().new_stream().map_err(failed);
        Ok(Self { device: device.clone(), to_host: stream()?, to_device: stream()? })
    }

    /// Calls `copy` with the address of a tensor that is used on `stream`, after all that the device's stream was
    /// given, and returns the point on `stream` after it.
    fn beside(
        &self,
        stream: &Arc<CudaStream>,
        (tensor, is_written): (&Tensor, bool),
        copy: &mut dyn FnMut(Address) -> Result<(), DriverError>,
    ) -> Result<CudaEvent, DeviceError> {
        stream.join(&self.device.cuda_stream()).map_err(failed)?;
        let opener = Opener { stream: Some(stream.clone()) };
        opener.open_all(&[(is_written, tensor)], &mut Vec::new(), &mut |addresses| {
            addresses.iter().try_for_each(|address| copy(*address)).map_err(failed)
        })?;
        stream.record_event(None).map_err(failed)
    }
}

impl HostCopies for CudaCopies {
    type Memory = PinnedHostSlice<u8>;
    type Copy = CudaEvent;

    fn allocate(&self, bytes: usize) -> Result<Self::Memory, DeviceError> {
        // Nothing but copies uses it, so neither portable nor mapped; write-combined memory is for what a CPU writes.
        let plain = 0;
        let context = self.device.cuda_stream().context().clone();
        // SAFETY: bytes, of which none is read before it was written. The driver does not allocate nothing.
        unsafe { context.alloc_pinned_with_flags(bytes.max(1), plain) }.map_err(failed)
    }

    fn store(&self, tensor: &Tensor, memory: &mut Self::Memory) -> Result<CudaEvent, DeviceError> {
        let bytes = crate::tensor::bytes(tensor);
        self.beside(&self.to_host, (tensor, false), &mut |address| {
            // SAFETY: the slice is used on the stream alone. The guard records that on its way out, and the memory is
            // not freed before.
            let (host, _recorded) = unsafe { memory.stream_synced_mut_slice(&self.to_host) };
            // SAFETY: the tensor has so many bytes, and its storage is open for reading on this stream.
            unsafe {
                result::memcpy_dtoh_async(&mut host[..bytes], address.pointer, self.to_host.cu_stream())
            }
        })
    }

    fn load(&self, memory: &mut Self::Memory, tensor: &Tensor) -> Result<CudaEvent, DeviceError> {
        let bytes = crate::tensor::bytes(tensor);
        self.beside(&self.to_device, (tensor, true), &mut |address| {
            // SAFETY: as above.
            let (host, _recorded) = unsafe { memory.stream_synced_slice(&self.to_device) };
            // SAFETY: the tensor has so many bytes, and its storage is open for writing on this stream.
            unsafe { result::memcpy_htod_async(address.pointer, &host[..bytes], self.to_device.cu_stream()) }
        })
    }

    fn hold(&self, copy: &CudaEvent) -> Result<(), DeviceError> {
        self.device.cuda_stream().wait(copy).map_err(failed)
    }
}

fn failed(failure: DriverError) -> DeviceError {
    DeviceError::Candle(candle_core::Error::wrap(failure))
}
