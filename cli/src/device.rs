//! The flag `--device`.

use super::{Failure, OrFail};
use clap::ValueEnum;
use ulysses::device::DeviceKind;

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum DeviceArg {
    /// CPU.
    Cpu,
    /// NVIDIA GPUs; needs a build with the feature `cuda`.
    Cuda,
}

impl DeviceArg {
    /// Returns the kind of device after checking that one can be opened.
    pub(super) fn kind(self) -> Result<DeviceKind, Failure> {
        let kind = DeviceKind::from(self);
        kind.open(0).or_usage()?;
        Ok(kind)
    }

    /// Returns its name on the command line.
    pub(super) fn name(self) -> &'static str {
        DeviceKind::from(self).name()
    }
}

impl From<DeviceArg> for DeviceKind {
    fn from(device: DeviceArg) -> Self {
        match device {
            DeviceArg::Cpu => Self::Cpu,
            DeviceArg::Cuda => Self::Cuda,
        }
    }
}
