//! The flag `--device`.

use clap::ValueEnum;

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
