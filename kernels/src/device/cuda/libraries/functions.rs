//! The functions of CUDA's libraries that this program calls: by itself, through cudarc, and through candle.

use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicPtr;

/// A function of a library.
pub(super) struct Function {
    /// Its name, with a zero byte at the end.
    pub(super) name: &'static str,
    /// Where the function of this name jumps to.
    pub(super) target: &'static AtomicPtr<c_void>,
}

/// Defines the functions of a library and lists them in `ALL`. Without the library, they return `missing`, which must be one
/// of its errors, and `texts` return a message.
macro_rules! library {
    ($library:ident: $file:literal, missing: $missing:literal, functions: [$($function:ident)*], texts: [$($text:ident)*]) => {
        pub(super) mod $library {
            pub(in super::super) static ALL: &[super::Function] =
                &[$(library!(@entry $function),)* $(library!(@entry $text),)*];

            extern "C" fn missing() -> super::c_int {
                $missing
            }

            $(library!(@define $function, super::missing);)*
            #[allow(dead_code, reason = "not all libraries return texts")]
            extern "C" fn message() -> *const std::ffi::c_char {
                concat!($file, " is not loaded\0").as_ptr().cast()
            }

            $(library!(@define $text, super::message);)*
        }
    };
    (@entry $function:ident) => {
        super::Function {
            name: concat!(stringify!($function), "\0"),
            target: &$function::TARGET,
        }
    };
    (@define $function:ident, $default:path) => {
        #[allow(non_snake_case, reason = "the library's name")]
        mod $function {
            use std::ffi::c_void;
            use std::sync::atomic::AtomicPtr;

            pub(super) static TARGET: AtomicPtr<c_void> = AtomicPtr::new($default as *mut c_void);

            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $function() {
                core::arch::naked_asm!("jmp qword ptr [rip + {}]", sym TARGET)
            }
        }
    };
}

library! {
    driver: "libcuda.so.1", missing: 34,
    functions: [
        cuCtxDestroy_v2 cuCtxGetCurrent cuCtxGetStreamPriorityRange cuCtxSetCurrent cuCtxSynchronize
        cuDeviceCanAccessPeer cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount cuDeviceGetMemPool cuDeviceGetName
        cuDeviceGetUuid cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuDeviceTotalMem_v2 cuDriverGetVersion
        cuEventCreate cuEventDestroy_v2 cuEventElapsedTime cuEventQuery cuEventRecord cuEventSynchronize
        cuFuncGetName cuFuncLoad cuFuncSetAttribute cuGetErrorString cuInit cuLaunchKernel cuMemAllocAsync
        cuMemAlloc_v2 cuMemFreeAsync cuMemFreeHost cuMemFree_v2 cuMemGetInfo_v2 cuMemHostAlloc cuMemPoolGetAttribute
        cuMemPoolSetAccess cuMemPoolSetAttribute cuMemcpyDtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2
        cuMemcpyPeerAsync cuMemsetD8Async cuModuleEnumerateFunctions cuModuleGetFunction cuModuleGetFunctionCount
        cuModuleLoad cuModuleLoadData cuModuleUnload cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2
        cuStreamIsCapturing cuStreamSynchronize cuStreamWaitEvent cuTensorMapEncodeTiled
    ],
    texts: []
}

library! {
    cublas: "libcublas", missing: 1,
    functions: [
        cublasCreate_v2 cublasDestroy_v2 cublasDgemmStridedBatched cublasGemmStridedBatchedEx cublasSetMathMode
        cublasSetStream_v2
    ],
    texts: []
}

library! {
    nvrtc: "libnvrtc", missing: 11,
    functions: [
        nvrtcCompileProgram nvrtcCreateProgram nvrtcDestroyProgram nvrtcGetCUBIN nvrtcGetCUBINSize
        nvrtcGetProgramLog nvrtcGetProgramLogSize nvrtcVersion
    ],
    texts: []
}

library! {
    curand: "libcurand.so.10", missing: 203,
    functions: [
        curandCreateGenerator curandDestroyGenerator curandGenerateNormal curandGenerateNormalDouble
        curandSetPseudoRandomGeneratorSeed curandSetStream
    ],
    texts: []
}

// Of candle's kernels for quantized models, which nothing here launches.
library! {
    runtime: "libcudart", missing: 34,
    functions: [
        __cudaGetKernel __cudaLaunchKernel_ptsz __cudaPopCallConfiguration __cudaPushCallConfiguration __cudaRegisterFatBinary __cudaRegisterFatBinaryEnd
        __cudaRegisterFunction __cudaRegisterVar __cudaUnregisterFatBinary cudaDeviceGetAttribute cudaFree
        cudaFreeAsync_ptsz cudaFuncGetAttributes cudaFuncSetAttribute cudaGetDevice cudaGetDeviceCount
        cudaGetLastError cudaLaunchKernel_ptsz cudaMalloc cudaMallocAsync_ptsz cudaMemsetAsync_ptsz
        cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cudaPeekAtLastError cudaSetDevice
        cudaStreamSynchronize_ptsz
    ],
    texts: [cudaGetErrorName cudaGetErrorString]
}

#[cfg(feature = "nccl")]
library! {
    nccl: "libnccl.so.2", missing: 2,
    functions: [
        ncclAllGather ncclAllReduce ncclBroadcast ncclCommAbort ncclCommDestroy ncclCommFinalize
        ncclCommGetAsyncError ncclCommInitRankConfig ncclCommSplit ncclGetUniqueId ncclGetVersion ncclGroupEnd
        ncclGroupStart ncclRecv ncclReduce ncclReduceScatter ncclSend
    ],
    texts: [ncclGetErrorString ncclGetLastError]
}
