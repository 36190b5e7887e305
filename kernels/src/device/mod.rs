//! Kernels on accelerators: how ops launch them, and what executes them.
//!
//! An op's host code is written once, against `Launcher`. It opens the addresses of its tensors and launches
//! `Kernel`s and `Matmul`s on them. What executes these depends on the launcher:
//!
//! | launcher | tensors | kernels | matmuls |
//! |---|---|---|---|
//! | CUDA (feature `cuda`) | on a GPU | NVRTC, on the device's stream | cuBLAS |
//! | dry (a thread within [`dry::run`]) | without elements | none | none |
//!
//! Machines without a GPU test all of it on a fake driver (`gpu/fake_driver`). `Target`
//! selects an op's implementation for its tensors. `HostCopies` does the same for asynchronous copies to the
//! host and back: streams of a GPU, or CPU copies that complete as late as allowed. [`DeviceTimes`] measures work:
//! events of a GPU, or the clock of the host.
#![cfg_attr(
    not(feature = "cuda"),
    allow(
        dead_code,
        unreachable_code,
        reason = "the ops' host code is compiled always, but nothing launches it"
    )
)]

mod address;
#[cfg(feature = "cuda")]
mod cuda;
pub mod dry;
mod error;
mod fence;
mod gpu_info;
mod gpus;
mod host_copies;
mod kernel;
mod kind;
mod launcher;
mod matmul;
#[cfg(any(feature = "cuda", test))]
mod staging;
mod target;
mod tensor_map;
mod times;
mod verdict_file;

pub use address::Address;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use cuda::fake_driver;
#[cfg(feature = "cuda")]
pub(crate) use cuda::{CudaCopies, elements as cuda_elements, upload};
#[cfg(feature = "cuda")]
pub use cuda::{allow_peer_access, load_library_kernels};
pub use error::DeviceError;
pub use fence::Fence;
pub use gpu_info::{Gpu, GpuMemory};
pub use gpus::{driver_cuda_version, gpu, gpu_count, gpu_memory, open_gpu, reset_gpu_peak};
pub(crate) use gpus::{explain_allocation, has_wgmma, kernel_refusal, multiprocessors};
pub(crate) use host_copies::{HostCopies, LateCopies};
pub(crate) use kernel::{Arg, Grid, Kernel, Source, sources};
pub use kind::DeviceKind;
pub use launcher::Launcher;
pub(crate) use matmul::{Matmul, MatrixAt};
pub use target::Target;
pub(crate) use tensor_map::TensorMap;
pub use times::{DeviceTimes, TimeStamp};
pub(crate) use verdict_file::VerdictFile;
