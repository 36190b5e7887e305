//! Kernels on accelerators: how the ops launch them, and what runs them.
//!
//! An op's host code is written once, against `Launcher`: it opens the addresses of its tensors, launches
//! `Kernel`s and [`Matmul`]s on them, and does not know what executes these:
//!
//! | launcher | tensors | kernels | products |
//! |---|---|---|---|
//! | CUDA (feature `cuda`) | on a GPU | NVRTC, on the device's stream | cuBLAS |
//! | emulation (feature `kernel-emulation`) | on the CPU, within `emulate` | compiled for the host | the `gemm` crate |
//! | dry (a thread within [`dry::run`]) | without elements | not at all | not at all |
//!
//! So all that a GPU runs but the driver calls themselves is tested on machines without one. `Target` tells an
//! op which way to go for the tensors at hand. `HostCopies` are the same for copies to the host and back that go on
//! beside the device's work: a GPU's streams, or copies on the CPU that are done as late as their order allows.
#![cfg_attr(
    not(any(feature = "cuda", feature = "kernel-emulation")),
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
#[cfg(feature = "kernel-emulation")]
mod emulation;
mod error;
mod fence;
mod host_copies;
mod kernel;
mod kind;
mod launcher;
mod matmul;
#[cfg(any(feature = "cuda", test))]
mod staging;
mod target;

pub use address::Address;
#[cfg(feature = "cuda")]
pub use cuda::open as open_gpu;
#[cfg(feature = "cuda")]
pub(crate) use cuda::{CudaCopies, elements as cuda_elements, upload};
#[cfg(feature = "kernel-emulation")]
pub use emulation::emulate;
pub use error::DeviceError;
pub use fence::Fence;
pub(crate) use host_copies::{HostCopies, LateCopies};
pub(crate) use kernel::{Arg, Grid, Kernel, sources};
pub use kind::DeviceKind;
pub use launcher::Launcher;
pub(crate) use matmul::{MatrixAt, Matmul};
pub use target::Target;
