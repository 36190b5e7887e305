//! Ordering between the streams of a GPU.

use super::DeviceError;
use candle_core::Device;

/// A point in the order of a device's work, after which work of other streams can be ordered.
///
/// Ranks that share a GPU have separate candle devices, and so separate streams. cudarc orders the uses of an
/// allocation by two events, one for its last write and one for its last *read*: of several reading streams
/// it remembers only one. So ranks that read one another's tensors order their streams themselves. The host
/// never waits.
#[derive(Debug, Clone)]
pub struct Fence {
    #[cfg(feature = "cuda")]
    event: std::sync::Arc<candle_core::cuda::cudarc::driver::CudaEvent>,
}

impl Fence {
    /// The point after all work queued on `device` so far. `None` on the CPU, where work is done when its
    /// call returns.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn after(device: &Device) -> Result<Option<Self>, DeviceError> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let event = device.cuda_stream().record_event(None).map_err(failed)?;
                Ok(Some(Self { event: std::sync::Arc::new(event) }))
            }
            _ => Ok(None),
        }
    }

    /// Makes all later work of `device` wait for the point.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn hold(&self, device: &Device) -> Result<(), DeviceError> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => device.cuda_stream().wait(&self.event).map_err(failed),
            _ => Ok(()),
        }
    }
}

#[cfg(feature = "cuda")]
fn failed(error: candle_core::cuda::cudarc::driver::DriverError) -> DeviceError {
    DeviceError::Candle(candle_core::Error::wrap(error))
}
