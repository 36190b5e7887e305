//! Preparation of a GPU whose rank is a thread next to other ranks, or waits for them on the GPU.

use super::no_gpu;
use crate::device::{DeviceError, Launcher, Matmul, MatrixAt};
use candle_core::cuda::cudarc::driver::{CudaContext, result, sys};
use candle_core::{DType, Device, Tensor};
use parking_lot::Mutex;

/// Rows and columns of the matmuls of [`load_library_kernels`]: cuBLAS selects its kernel by size.
const SIZES: [usize; 2] = [32, 256];

/// Runs every kind of cast and matmul, so that candle and cuBLAS load their kernels now: candle for each device that
/// was opened, cuBLAS for each GPU.
///
/// They load a kernel at its first use, where the driver may wait for the GPU. If that waits in a collective for
/// another rank, whose thread of this process waits for the driver's loading lock, all wait forever.
///
/// # Errors
/// A failed launch.
pub fn load_library_kernels(device: &Device) -> Result<(), DeviceError> {
    /// Ordinals of the GPUs that have loaded those of cuBLAS.
    static LOADED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    let Device::Cuda(cuda) = device else { return Ok(()) };
    let (launcher, gpu) = (Launcher::Cuda(cuda.clone()), cuda.cuda_stream().context().ordinal());
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    for (dtype, other) in dtypes.into_iter().flat_map(|dtype| dtypes.map(|other| (dtype, other))) {
        Tensor::zeros(1, dtype, device)?.to_dtype(other)?;
    }
    // What `ulysses verify` does with gathered gradients and logits.
    let scaled = Tensor::zeros((1, 1), DType::F32, device)?.affine(1.0, 0.0)?;
    Tensor::cat(&[&scaled, &scaled], 1)?.to_dtype(DType::F64)?;
    let mut loaded = LOADED.lock();
    if !loaded.contains(&gpu) {
        for (dtype, size) in dtypes.into_iter().flat_map(|dtype| SIZES.map(|size| (dtype, size))) {
            let matrices = Tensor::zeros((2, size, size), dtype, device)?;
            for result in [dtype, DType::F32] {
                multiply(&launcher, &matrices, &Tensor::zeros((size, size), result, device)?)?;
            }
        }
        loaded.push(gpu);
    }
    cuda.cuda_stream().synchronize().map_err(no_gpu)
}

/// Multiplies two matrices, as they are and transposed.
fn multiply(launcher: &Launcher, matrices: &Tensor, result: &Tensor) -> Result<(), DeviceError> {
    let size = result.dims()[0];
    launcher.open([result], [matrices], |[c], [a]| {
        let [a, b] = [a, a.offset(size * size)].map(|at| MatrixAt::row_major(at, size, size, size));
        let c = MatrixAt::row_major(c, size, size, size);
        for (a, b) in [(a, b), (a.transposed(), b), (a, b.transposed())] {
            let matmul = Matmul { alpha: 1.0, a, b, beta: 0.0, c, batch: 1 };
            // SAFETY: all matrices have the sizes of the opened tensors.
            unsafe { launcher.gemm(&matmul) }?;
        }
        Ok(())
    })
}

/// Lets the other GPUs access the memory of this one's tensors, as far as the machine connects them.
///
/// Access between contexts does not include memory pools, from which tensors are allocated.
///
/// # Errors
/// A failed call of the driver.
pub fn allow_peer_access(device: &Device) -> Result<(), DeviceError> {
    let Device::Cuda(cuda) = device else { return Ok(()) };
    let stream = cuda.cuda_stream();
    let context = stream.context();
    if !context.has_async_alloc() {
        return Ok(());
    }
    let own = context.cu_device();
    for peer in 0..CudaContext::device_count().map_err(no_gpu)? {
        let peer = result::device::get(peer).map_err(no_gpu)?;
        if peer == own {
            continue;
        }
        let mut can = 0;
        // SAFETY: `can` outlives the call, and both GPUs exist.
        unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, peer, own) }.result().map_err(no_gpu)?;
        if can == 0 {
            continue;
        }
        let location =
            sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: peer };
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location, flags };
        // SAFETY: the default pool of a GPU that is open, and one description, which outlives the call.
        unsafe {
            result::device::get_mem_pool(own)
                .and_then(|pool| sys::cuMemPoolSetAccess(pool, &raw const access, 1).result())
        }
        .map_err(no_gpu)?;
    }
    Ok(())
}
