//! Queries of the driver: GPUs, their memory, its version.

use super::{libraries, no_gpu, set_pool_attribute};
use crate::device::{DeviceError, Gpu, GpuMemory};
use candle_core::CudaDevice;
use candle_core::cuda::cudarc::driver::{CudaContext, DriverError, result, sys};

/// Number of visible GPUs, at least one.
pub(in crate::device) fn count() -> Result<usize, DeviceError> {
    libraries::need_driver().map_err(|message| DeviceError::NoGpu { message })?;
    match CudaContext::device_count().map_err(no_gpu)? {
        gpus if gpus > 0 => Ok(gpus as usize),
        _ => Err(DeviceError::NoGpu { message: "the driver finds none".to_owned() }),
    }
}

/// Describes a GPU without starting anything on it.
pub(in crate::device) fn describe(ordinal: usize) -> Result<Gpu, DeviceError> {
    let gpus = count()?;
    let describe = || -> Result<Gpu, DriverError> {
        let device = result::device::get(ordinal as i32)?;
        let mut peers = Vec::new();
        for other in (0..gpus).filter(|other| *other != ordinal) {
            let mut can_access = 0;
            // SAFETY: both are devices of this process, and the result is written to a live variable.
            unsafe {
                let other = result::device::get(other as i32)?;
                sys::cuDeviceCanAccessPeer(&raw mut can_access, device, other).result()?;
            }
            if can_access == 1 {
                peers.push(other);
            }
        }
        // SAFETY: a device of this process.
        let total_bytes = unsafe { result::device::total_mem(device) }? as u64;
        Ok(Gpu { name: result::device::get_name(device)?, total_bytes, peers })
    };
    describe().map_err(no_gpu)
}

/// The CUDA version that the driver supports: major, minor.
pub(in crate::device) fn driver_version() -> Result<(u32, u32), DeviceError> {
    let mut version = 0;
    // SAFETY: the result is written to a live variable; the call needs no initialization.
    unsafe { sys::cuDriverGetVersion(&raw mut version).result() }.map_err(no_gpu)?;
    let version = version.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

/// The compute capability of a GPU: major, minor.
pub(in crate::device) fn compute_capability(device: &CudaDevice) -> Result<(i32, i32), DriverError> {
    device.cuda_stream().context().compute_capability()
}

/// The number of multiprocessors of a GPU.
pub(in crate::device) fn multiprocessors(device: &CudaDevice) -> Result<usize, DeviceError> {
    use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let stream = device.cuda_stream();
    let count = stream.context().attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).map_err(no_gpu)?;
    Ok(count as usize)
}

/// The memory of a GPU, and what the pool of this process has allocated of it.
pub(in crate::device) fn memory(device: &CudaDevice) -> Result<GpuMemory, DriverError> {
    use sys::CUmemPool_attribute as Attribute;
    let stream = device.cuda_stream();
    let context = stream.context();
    context.bind_to_thread()?;
    let (free, total) = result::mem_get_info()?;
    let [free, total] = [free, total].map(|bytes| bytes as u64);
    if !context.has_async_alloc() {
        let in_use = total - free;
        return Ok(GpuMemory { free, total, in_use, peak: in_use, reserved: in_use });
    }
    // SAFETY: the GPU is open, and the attribute's value is 64 bits that outlive the call.
    let pool = unsafe { result::device::get_mem_pool(context.cu_device()) }?;
    let read = |attribute| {
        let mut bytes = 0_u64;
        // SAFETY: as above.
        unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()) }?;
        Ok::<_, DriverError>(bytes)
    };
    Ok(GpuMemory {
        free,
        total,
        in_use: read(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
        peak: read(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        reserved: read(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
    })
}

/// Starts the peak of the pool anew, at what is in use.
pub(in crate::device) fn reset_peak(device: &CudaDevice) -> Result<(), DeviceError> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let reset = || {
        context.bind_to_thread()?;
        set_pool_attribute(context, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)
    };
    reset().map_err(no_gpu)
}
