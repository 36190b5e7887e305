//! The GPUs that this process sees, and their memory.

use super::{DeviceError, Gpu, GpuMemory, Source};
use candle_core::Device;

/// Number of GPUs that this process sees: those of `CUDA_VISIBLE_DEVICES`, else all of the machine.
///
/// # Errors
/// A build without the feature `cuda`, or a machine without a driver or GPU.
pub fn gpu_count() -> Result<usize, DeviceError> {
    #[cfg(feature = "cuda")]
    return super::cuda::count();
    #[cfg(not(feature = "cuda"))]
    Err(not_built())
}

/// A GPU by its ordinal.
///
/// # Errors
/// As [`gpu_count`], or fewer GPUs.
pub fn gpu(ordinal: usize) -> Result<Gpu, DeviceError> {
    #[cfg(feature = "cuda")]
    return super::cuda::describe(ordinal);
    #[cfg(not(feature = "cuda"))]
    {
        _ = ordinal;
        Err(not_built())
    }
}

/// Opens a GPU by its ordinal, with a separate stream, and loads all kernels on it.
///
/// # Errors
/// As [`gpu`], or kernels that the driver or NVRTC refuses.
pub fn open_gpu(ordinal: usize) -> Result<Device, DeviceError> {
    #[cfg(feature = "cuda")]
    return super::cuda::open(ordinal);
    #[cfg(not(feature = "cuda"))]
    {
        _ = ordinal;
        Err(not_built())
    }
}

/// The CUDA version that the driver supports: major, minor.
///
/// # Errors
/// A build without the feature `cuda`, or a failed call of the driver.
pub fn driver_cuda_version() -> Result<(u32, u32), DeviceError> {
    #[cfg(feature = "cuda")]
    return super::cuda::driver_version();
    #[cfg(not(feature = "cuda"))]
    Err(not_built())
}

/// The memory of a device; `None` for the CPU, or if the driver does not report it.
pub fn gpu_memory(device: &Device) -> Option<GpuMemory> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return super::cuda::memory(device).ok();
    }
    _ = device;
    None
}

/// Starts the peak of a GPU's memory ([`GpuMemory::peak`]) anew, at what is in use, as
/// `torch.cuda.reset_peak_memory_stats` does. Nothing to do on the CPU.
///
/// # Errors
/// A failed call of the driver.
pub fn reset_gpu_peak(device: &Device) -> Result<(), DeviceError> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return super::cuda::reset_peak(device);
    }
    _ = device;
    Ok(())
}

/// Returns whether a device is a GPU of compute capability 9.0, which alone has `wgmma`.
pub(crate) fn has_wgmma(device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return super::cuda::compute_capability(device).is_ok_and(|capability| capability == (9, 0));
    }
    _ = device;
    false
}

/// The number of a GPU's multiprocessors; 1 on the CPU.
///
/// # Errors
/// A failed call of the driver.
pub(crate) fn multiprocessors(device: &Device) -> Result<usize, DeviceError> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return super::cuda::multiprocessors(device);
    }
    _ = device;
    Ok(1)
}

/// Why one of the files of kernels does not compile or load on a device that is usable without it; `None` if all do.
///
/// # Errors
/// A GPU whose other kernels do not load either.
pub(crate) fn kernel_refusal(
    device: &Device,
    files: &[&'static Source],
) -> Result<Option<String>, DeviceError> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        let failed = |message| DeviceError::Open { gpu: cuda.cuda_stream().context().ordinal(), message };
        return super::cuda::refusal(cuda, files).map_err(failed);
    }
    _ = (device, files);
    Ok(None)
}

#[cfg(not(feature = "cuda"))]
fn not_built() -> DeviceError {
    DeviceError::NotBuilt { device: candle_core::DeviceLocation::Cuda { gpu_id: 0 }, feature: "cuda" }
}

/// Adds the state of the GPU to the error of an allocation that was too large for it.
pub(crate) fn explain_allocation(
    error: candle_core::Error,
    requested: usize,
    device: &Device,
) -> candle_core::Error {
    explain(error, requested, || gpu_memory(device))
}

fn explain(
    error: candle_core::Error,
    requested: usize,
    memory: impl FnOnce() -> Option<GpuMemory>,
) -> candle_core::Error {
    if !error.to_string().contains("OUT_OF_MEMORY") {
        return error;
    }
    match memory() {
        Some(memory) => {
            candle_core::Error::wrap(DeviceError::OutOfMemory { requested: requested as u64, memory })
        }
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn an_allocation_that_is_too_large_reports_the_memory_of_the_gpu() {
        let memory = GpuMemory {
            free: GIB / 2,
            total: 80 * GIB,
            in_use: 70 * GIB,
            peak: 71 * GIB,
            reserved: 75 * GIB,
        };
        let failed =
            |message: &str| explain(candle_core::Error::msg(message), 3 << 30, || Some(memory)).to_string();
        let text = failed("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")");
        let expected = "out of GPU memory: requested 3.00 GiB, free 512.00 MiB of 80.00 GiB; tensors of this process take \
                        70.00 GiB, other blocks of its allocator 5.00 GiB";
        assert!(text.starts_with(expected), "{text}");
        assert!(failed("CUDA_ERROR_ILLEGAL_ADDRESS").contains("CUDA_ERROR_ILLEGAL_ADDRESS"));
    }
}
