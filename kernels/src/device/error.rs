//! What can go wrong on a device.

use candle_core::{DType, DeviceLocation};

/// Why a kernel or a product did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The build has no kernels for the tensors' device.
    #[error("no kernels for {} in this build: it lacks the feature `{feature}`", name(*device))]
    NotBuilt {
        /// Where the tensors are.
        device: DeviceLocation,
        /// The cargo feature that brings the kernels.
        feature: &'static str,
    },
    /// A tensor that kernels do not take.
    #[error("kernels take contiguous {expected} tensors, got {got:?}{layout}")]
    Tensor {
        /// The dtypes that are taken.
        expected: &'static str,
        /// The tensor's dtype.
        got: DType,
        /// What else is wrong with it.
        layout: &'static str,
    },
    /// There is no GPU to run on.
    #[error("no NVIDIA GPU can be used: {message}")]
    NoGpu {
        /// What is missing.
        message: String,
    },
    /// Tensors on the CPU among those of a GPU's kernel.
    #[error("a kernel's tensors are all on one device")]
    MixedDevices,
    /// A kernel does not exist for an element type.
    #[error("there is no kernel `{kernel}` for {dtype:?}")]
    NoKernel {
        /// Its name.
        kernel: &'static str,
        /// The element type.
        dtype: DType,
    },
    /// A kernel could not be compiled, loaded or started.
    #[error("kernel `{kernel}`: {message}")]
    Launch {
        /// Its name.
        kernel: String,
        /// What the driver, the compiler or the emulation says.
        message: String,
    },
    /// A matrix product could not be started.
    #[error("matrix product of {a:?} and {b:?}: {message}")]
    Matmul {
        /// Rows and columns of the left matrix.
        a: [usize; 2],
        /// Rows and columns of the right matrix.
        b: [usize; 2],
        /// What the library says.
        message: String,
    },
    /// What was to come back from the host's memory was never brought there.
    #[error("{bytes} bytes are to be copied from where nothing was copied to")]
    NotWritten {
        /// How many bytes.
        bytes: u64,
    },
    /// candle refused an operation on a tensor.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// A device as users write it.
fn name(device: DeviceLocation) -> String {
    match device {
        DeviceLocation::Cpu => "cpu".to_owned(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}
