//! The error of a device.

use super::GpuMemory;
use candle_core::{DType, DeviceLocation};

/// The reason why a kernel or a matmul did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The build has no kernels for the tensors' device.
    #[error("no kernels for {} in this build: it lacks the feature `{feature}`", name(*device))]
    NotBuilt {
        /// Device of the tensors.
        device: DeviceLocation,
        /// The cargo feature with the kernels.
        feature: &'static str,
    },
    /// A tensor that kernels do not support.
    #[error("kernels need contiguous {expected} tensors, got {got:?}{layout}")]
    Tensor {
        /// The supported dtypes.
        expected: &'static str,
        /// The tensor's dtype.
        got: DType,
        /// A further problem with the tensor.
        layout: &'static str,
    },
    /// No GPU is available.
    #[error("no usable NVIDIA GPU: {message}")]
    NoGpu {
        /// What is missing.
        message: String,
    },
    /// A GPU cannot be used, or not with this program's kernels.
    #[error("cannot open GPU {gpu}: {message}")]
    Open {
        /// Its ordinal.
        gpu: usize,
        /// The error of the driver or of the compiler.
        message: String,
    },
    /// A tensor does not fit on its GPU.
    #[error(
        "out of GPU memory: requested {}, free {} of {}; tensors of this process take {}, other blocks of its allocator {}",
        size(*requested), size(memory.free), size(memory.total), size(memory.in_use),
        size(memory.reserved.saturating_sub(memory.in_use))
    )]
    OutOfMemory {
        /// Bytes of the tensor.
        requested: u64,
        /// The memory of the GPU.
        memory: GpuMemory,
    },
    /// The host has no memory for copies from or to a GPU.
    #[error("cannot allocate {} of page-locked host memory: {message}", size(*requested))]
    PageLocked {
        /// Bytes of the copy.
        requested: u64,
        /// The error of the driver, or the remedy.
        message: String,
    },
    /// A GPU kernel's arguments include tensors on the CPU.
    #[error("all tensors of a kernel must be on one device")]
    MixedDevices,
    /// A kernel does not exist for an element type.
    #[error("there is no kernel `{kernel}` for {dtype:?}")]
    NoKernel {
        /// Its name.
        kernel: &'static str,
        /// The element type.
        dtype: DType,
    },
    /// A tensor that TMA cannot copy from.
    #[error("tensor map: {message}")]
    TensorMap {
        /// The error of the driver or the emulation.
        message: String,
    },
    /// A kernel could not be compiled, loaded or launched.
    #[error("kernel `{kernel}`: {message}")]
    Launch {
        /// Its name.
        kernel: String,
        /// The error of the driver, the compiler or the emulation.
        message: String,
    },
    /// A matmul could not be started.
    #[error("matmul of {a:?} and {b:?}: {message}")]
    Matmul {
        /// Rows and columns of the left matrix.
        a: [usize; 2],
        /// Rows and columns of the right matrix.
        b: [usize; 2],
        /// The error of the library.
        message: String,
    },
    /// Data was read from host memory that was never written.
    #[error("cannot load {bytes} bytes from host memory that was never written")]
    NotWritten {
        /// Number of bytes.
        bytes: u64,
    },
    /// candle refused an operation on a tensor.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

fn size(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{:.2} KiB", bytes as f64 / f64::from(1 << 10)),
        0x10_0000..0x4000_0000 => format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// A device in users' notation.
fn name(device: DeviceLocation) -> String {
    match device {
        DeviceLocation::Cpu => "cpu".to_owned(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}
