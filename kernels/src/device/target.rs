//! The implementation that an op uses.

use super::dry::{self, DryCpu};
use super::{DeviceError, DeviceKind, Launcher};
use candle_core::Device;

/// The executor of an op for tensors of a device.
pub enum Target {
    /// The op's CPU kernel.
    Cpu,
    /// The same in a dry run, which only reports it.
    Dry(DryCpu),
    /// The op's CUDA kernels, on a GPU or dry.
    Kernels(Launcher),
}

impl Target {
    /// The target for tensors on `device`.
    ///
    /// # Errors
    /// A device that this build has no kernels for.
    pub fn of(device: &Device) -> Result<Self, DeviceError> {
        match (device, dry::kind()) {
            (Device::Cpu, Some(DeviceKind::Cpu)) => Ok(Self::Dry(DryCpu::of_thread())),
            (Device::Cpu, Some(DeviceKind::Cuda)) => Ok(Self::Kernels(Launcher::Dry)),
            (Device::Cpu, None) => Ok(Self::Cpu),
            #[cfg(feature = "cuda")]
            (Device::Cuda(device), _) => Ok(Self::Kernels(Launcher::Cuda(device.clone()))),
            (other, _) => Err(DeviceError::NotBuilt { device: other.location(), feature: "cuda" }),
        }
    }
}
