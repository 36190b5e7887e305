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

    /// Opens the device of ranks that are threads of one process: the host, or the first visible GPU. Such ranks copy
    /// from each other's tensors, which must be on one GPU. Each call creates a separate stream.
    ///
    /// # Errors
    /// A build without the feature, or a machine without a driver or GPU.
    pub fn open(self) -> Result<Device, DeviceError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda => super::gpus::open_gpu(0),
        }
    }

    /// The name of that device: `cpu`, or the name of the GPU, such as `NVIDIA H100 80GB HBM3`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn describe(self) -> Result<String, DeviceError> {
        match self {
            Self::Cpu => Ok("cpu".to_owned()),
            Self::Cuda => super::gpus::gpu(0).map(|gpu| gpu.name),
        }
    }
}
