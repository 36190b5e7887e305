//! Copies between a GPU and page-locked host memory, on separate streams.
//!
//! Each direction has a stream, so that an update can offload one unit's state while the next one's arrives.
//! Events that cudarc keeps per block of memory order its uses. A copy starts after all earlier work of the
//! device's stream. Later work overlaps with the copy, up to a [`HostCopies::hold`].

use super::no_page_locked;
use crate::device::address::Opener;
use crate::device::{Address, DeviceError, HostCopies};
use candle_core::cuda::cudarc::driver::{
    CudaEvent, CudaStream, DriverError, HostSlice, PinnedHostSlice, result,
};
use candle_core::{CudaDevice, Tensor};
use std::sync::Arc;

/// A rank's copy streams for one kind of offloaded tensor.
#[derive(Debug)]
pub(crate) struct CudaCopies {
    device: CudaDevice,
    to_host: Arc<CudaStream>,
    to_device: Arc<CudaStream>,
}

impl CudaCopies {
    /// Creates the streams for `device`.
    ///
    /// # Errors
    /// An error of the driver.
    pub(crate) fn new(device: &CudaDevice) -> Result<Self, DeviceError> {
        let stream = || device.cuda_stream().context().new_stream().map_err(failed);
        Ok(Self { device: device.clone(), to_host: stream()?, to_device: stream()? })
    }

    /// Calls `copy` with the address of a tensor that is used on `stream`, after all earlier work of the
    /// device's stream. Returns the point on `stream` after it.
    fn on_stream(
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
        // The GPU only copies from and to this memory, so it is neither portable nor mapped. Write-combined memory
        // is slow for the CPU to read.
        let plain = 0;
        let context = self.device.cuda_stream().context().clone();
        // SAFETY: bytes, none of which is read before it is written. The driver cannot allocate zero bytes.
        unsafe { context.alloc_pinned_with_flags(bytes.max(1), plain) }.map_err(no_page_locked(bytes))
    }

    fn store(&self, tensor: &Tensor, memory: &mut Self::Memory) -> Result<CudaEvent, DeviceError> {
        let bytes = crate::tensor::bytes(tensor);
        self.on_stream(&self.to_host, (tensor, false), &mut |address| {
            // SAFETY: the slice is used on the stream only. The guard records that when dropped, and the
            // memory is not freed before.
            let (host, _recorded) = unsafe { memory.stream_synced_mut_slice(&self.to_host) };
            // SAFETY: the tensor has so many bytes, and its storage is open for reading on this stream.
            unsafe {
                result::memcpy_dtoh_async(&mut host[..bytes], address.pointer, self.to_host.cu_stream())
            }
        })
    }

    fn load(&self, memory: &mut Self::Memory, tensor: &Tensor) -> Result<CudaEvent, DeviceError> {
        let bytes = crate::tensor::bytes(tensor);
        self.on_stream(&self.to_device, (tensor, true), &mut |address| {
            // SAFETY: as above.
            let (host, _recorded) = unsafe { memory.stream_synced_slice(&self.to_device) };
            // SAFETY: the tensor has so many bytes, and its storage is open for writing on this stream.
            unsafe { result::memcpy_htod_async(address.pointer, &host[..bytes], self.to_device.cu_stream()) }
        })
    }

    fn hold(&self, copy: &CudaEvent) -> Result<(), DeviceError> {
        self.device.cuda_stream().wait(copy).map_err(failed)
    }

    fn bytes<'a>(&self, memory: &'a mut Self::Memory) -> Result<&'a mut [u8], DeviceError> {
        // Waits for the event that the guards of `store` and `load` recorded last.
        memory.as_mut_slice().map_err(failed)
    }
}

fn failed(failure: DriverError) -> DeviceError {
    DeviceError::Candle(candle_core::Error::wrap(failure))
}
