//! The choice of a device.

use super::DeviceError;
use candle_core::Device;

/// The kinds of devices that tensors may be on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceKind {
    /// The CPU of the host.
    #[default]
    Cpu,
    /// NVIDIA GPUs, with the feature `cuda`.
    Cuda,
}

impl DeviceKind {
    /// Name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// Opens the device of a rank: the host, or a GPU, which ranks share if there are more ranks than GPUs.
    /// Each rank has a separate stream.
    ///
    /// # Errors
    /// A build without the feature, or a machine without a driver or GPU.
    pub fn open(self, local_rank: usize) -> Result<Device, DeviceError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            #[cfg(feature = "cuda")]
            Self::Cuda => super::cuda::open_shared(local_rank),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => Err(not_built(local_rank)),
        }
    }

    /// The name of a rank's device: `cpu`, or the name of the GPU, such as `NVIDIA H100 80GB HBM3`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn describe(self, local_rank: usize) -> Result<String, DeviceError> {
        match self {
            Self::Cpu => Ok("cpu".to_owned()),
            #[cfg(feature = "cuda")]
            Self::Cuda => super::cuda::name_of(local_rank),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => Err(not_built(local_rank)),
        }
    }
}

#[cfg(not(feature = "cuda"))]
fn not_built(local_rank: usize) -> DeviceError {
    let device = candle_core::DeviceLocation::Cuda { gpu_id: local_rank };
    DeviceError::NotBuilt { device, feature: "cuda" }
}
