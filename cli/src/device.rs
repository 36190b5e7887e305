//! The flag `--device`.

use clap::ValueEnum;
use ulysses::device::DeviceKind;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum DeviceArg {
    /// GPUs if the build and the machine have them, else the CPU.
    #[default]
    Auto,
    /// CPU.
    Cpu,
    /// NVIDIA GPUs; needs a build with the feature `cuda`.
    Cuda,
}

impl DeviceArg {
    /// Returns the stated kind of device; `None` for `auto`.
    pub(super) fn kind(self) -> Option<DeviceKind> {
        match self {
            Self::Auto => None,
            Self::Cpu => Some(DeviceKind::Cpu),
            Self::Cuda => Some(DeviceKind::Cuda),
        }
    }
}
