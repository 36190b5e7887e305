//! Choosing a device.

use super::DeviceError;
use candle_core::Device;

/// The kinds of devices that tensors may be on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceKind {
    /// The host.
    #[default]
    Cpu,
    /// NVIDIA GPUs, with the feature `cuda`.
    Cuda,
}

impl DeviceKind {
    /// The device of a rank: the host, or with more ranks than GPUs one that it shares. Each rank has a stream of
    /// its own.
    ///
    /// # Errors
    /// A build without the feature, a machine without a driver or a GPU.
    pub fn open(self, local_rank: usize) -> Result<Device, DeviceError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            #[cfg(feature = "cuda")]
            Self::Cuda => super::cuda::open_shared(local_rank),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => {
                let device = candle_core::DeviceLocation::Cuda { gpu_id: local_rank };
                Err(DeviceError::NotBuilt { device, feature: "cuda" })
            }
        }
    }
}
