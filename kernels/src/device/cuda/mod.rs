//! The launcher on NVIDIA GPUs.
//!
//! All work goes to the stream of the tensors' candle device, so calls run in order and nothing here waits
//! for the GPU. Tensors of another stream of the same GPU (a peer rank's) are synchronized by events, which
//! cudarc keeps with every allocation: opening a tensor makes this stream wait for its last writer. cudarc
//! remembers only one reader. If several ranks read a tensor, [`Fence`](super::Fence)s order the next write
//! after all of them.

mod cache;
mod copies;
#[cfg(test)]
pub(crate) mod fake_driver;
#[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), path = "libraries/linked.rs")]
mod libraries;
mod matmul;
mod module;
mod pointer;
mod query;
mod shared;
mod tensor_map;
#[cfg(test)]
mod tests;
mod upload;

pub(super) use cache::{lock, store};
pub(crate) use copies::CudaCopies;
pub(super) use matmul::gemm;
pub(super) use module::{refusal, verdict_path};
pub(crate) use pointer::elements;
pub(super) use pointer::{with_pointer, with_pointer_mut};
pub(super) use query::{
    compute_capability, count, describe, driver_version, memory, multiprocessors, reset_peak,
};
pub use shared::{allow_peer_access, load_library_kernels};
pub(super) use tensor_map::encode;
pub(crate) use upload::upload;

use super::{Arg, DeviceError, Grid, Kernel};
use candle_core::cuda::cudarc::driver::{CudaContext, DriverError, result, sys};
use candle_core::{CudaDevice, Device};

/// Dynamic shared memory that a kernel may use without opting in.
const DEFAULT_SHARED_BYTES: usize = 48 * 1024;

/// Starts a kernel on the device's stream.
///
/// # Safety
/// As [`Launcher::launch`](super::Launcher::launch).
pub(super) unsafe fn launch(
    device: &CudaDevice,
    kernel: &Kernel,
    [x, y, z]: [u32; 3],
    grid: Grid,
    args: &[Arg<'_>],
) -> Result<(), DeviceError> {
    let error = |message: String| DeviceError::Launch { kernel: kernel.name.clone(), message };
    let stream = device.cuda_stream();
    // First bind the context to this thread; the calls below need it.
    stream.context().bind_to_thread().map_err(|failure| error(failure.to_string()))?;
    let function = module::function(stream.context(), kernel)?;
    if grid.shared_bytes > DEFAULT_SHARED_BYTES {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a function that is loaded.
        unsafe { result::function::set_function_attribute(function.0, attribute, grid.shared_bytes as i32) }
            .map_err(|failure| error(format!("{} bytes of shared memory: {failure}", grid.shared_bytes)))?;
    }
    #[cfg(test)]
    fake_driver::before_launch(kernel, args).map_err(error)?;
    let mut parameters: Vec<_> = args.iter().map(Arg::pointer).collect();
    // SAFETY: the parameters live until the call returns, which has copied them; the caller guarantees that
    // they match the kernel.
    unsafe {
        result::launch_kernel(
            function.0,
            (x, y, z),
            (grid.threads, 1, 1),
            grid.shared_bytes as u32,
            stream.cu_stream(),
            &mut parameters,
        )
    }
    .map_err(|failure| error(failure.to_string()))
}

fn no_gpu(failure: DriverError) -> DeviceError {
    DeviceError::NoGpu { message: failure.to_string() }
}

/// The error of an allocation of page-locked host memory. CUDA's name for it would suggest that the GPU is full.
fn no_page_locked(bytes: usize) -> impl Fn(DriverError) -> DeviceError {
    const REMEDY: &str =
        "the host has no more; free some, offload less, or raise its limits (cgroup, `ulimit -l`)";
    move |failure| {
        let message = match failure.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => REMEDY.to_owned(),
            _ => failure.to_string(),
        };
        DeviceError::PageLocked { requested: bytes as u64, message }
    }
}

/// Opens a GPU with a separate stream that does not synchronize with the default stream, and loads all
/// kernels.
pub(super) fn open(ordinal: usize) -> Result<Device, DeviceError> {
    let failed = |message: String| DeviceError::Open { gpu: ordinal, message };
    libraries::need_all().map_err(failed)?;
    let device = CudaDevice::new_with_stream(ordinal).map_err(|error| failed(error.to_string()))?;
    let stream = device.cuda_stream();
    keep_freed_memory(stream.context()).map_err(|error| failed(error.to_string()))?;
    module::functions(stream.context()).map_err(failed)?;
    Ok(Device::Cuda(device))
}

/// Keeps freed memory in the GPU's pool. By default it returns to the driver whenever the host synchronizes,
/// which is once per step, and the next step would allocate everything again.
fn keep_freed_memory(context: &CudaContext) -> Result<(), DriverError> {
    set_pool_attribute(context, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)
}

/// Sets an attribute of the GPU's pool, if it has one.
fn set_pool_attribute(
    context: &CudaContext,
    attribute: sys::CUmemPool_attribute,
    mut value: u64,
) -> Result<(), DriverError> {
    if !context.has_async_alloc() {
        return Ok(());
    }
    // SAFETY: the GPU is open, and the attribute's value is 64 bits that outlive the call.
    unsafe {
        let pool = result::device::get_mem_pool(context.cu_device())?;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut value).cast())
    }
}
