//! Which way an op goes.

use super::{DeviceError, Launcher};
use candle_core::Device;

/// What computes on a device's tensors.
pub enum Target {
    /// The op's CPU kernel.
    Cpu,
    /// The op's CUDA kernels, on a GPU or emulated.
    Kernels(Launcher),
}

impl Target {
    /// The target for tensors on `device`.
    ///
    /// # Errors
    /// A device that this build has no kernels for.
    pub fn of(device: &Device) -> Result<Self, DeviceError> {
        match device {
            #[cfg(feature = "kernel-emulation")]
            Device::Cpu if super::emulation::is_active() => Ok(Self::Kernels(Launcher::Emulated)),
            Device::Cpu => Ok(Self::Cpu),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Ok(Self::Kernels(Launcher::Cuda(device.clone()))),
            other => Err(DeviceError::NotBuilt { device: other.location(), feature: "cuda" }),
        }
    }
}
