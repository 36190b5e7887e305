//! Kernels by name, their grids and their parameters.

use super::{Address, DeviceError};
use candle_core::DType;

/// A file of `cuda/`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// Its name without the extension.
    pub(crate) name: &'static str,
    /// Its text, with the `#include` of headers still in it.
    pub(crate) text: &'static str,
    /// The only architecture that it compiles for, such as `sm_90a`: that of the GPUs of one compute capability.
    pub(crate) only_for: Option<&'static str>,
}

impl Source {
    /// Returns whether there are other kernels for all that this file computes, so that a GPU is usable without it.
    #[cfg(feature = "cuda")]
    pub(super) fn is_optional(&self) -> bool {
        let optional = [
            &sources::ATTENTION_FUSED_BACKWARD,
            &sources::ATTENTION_FUSED_BACKWARD_WGMMA,
            &sources::ATTENTION_FUSED_FORWARD,
            &sources::ATTENTION_FUSED_FORWARD_WGMMA,
        ];
        self.name.starts_with("tests/") || optional.iter().any(|source| source.name == self.name)
    }
}

/// The files of `cuda/`, each compiled as one module.
pub(crate) mod sources {
    use super::Source;

    macro_rules! sources {
        ($($constant:ident => $name:literal $(for $architecture:literal)?),* $(,)?) => {
            $(
            #[doc = concat!("`cuda/", $name, ".cu`.")]
            pub(crate) static $constant: Source = Source {
                name: $name,
                text: include_str!(concat!("../../cuda/", $name, ".cu")),
                only_for: [$(Some($architecture),)? None][0],
            };
            )*

            /// Every one of these files.
            #[cfg(feature = "cuda")]
            pub(in crate::device) static ALL: &[&Source] = &[$(&$constant),*];
        };
    }
    sources! {
        ATTENTION => "attention",
        ATTENTION_FUSED_BACKWARD => "attention_fused_backward",
        ATTENTION_FUSED_BACKWARD_WGMMA => "attention_fused_backward_wgmma" for "sm_90a",
        ATTENTION_FUSED_FORWARD => "attention_fused_forward",
        ATTENTION_FUSED_FORWARD_WGMMA => "attention_fused_forward_wgmma" for "sm_90a",
        ATTENTION_SINK => "attention_sink",
        CAST => "cast",
        CAUSAL_CONV => "causal_conv",
        DECAY_GATES => "decay_gates",
        LM_HEAD_LOSS => "lm_head_loss",
        EMBEDDING => "embedding",
        LINEAR_ATTENTION_BACKWARD => "linear_attention_backward",
        LINEAR_ATTENTION_FORWARD => "linear_attention_forward",
        GLU => "glu",
        LAMB => "lamb",
        OPTIMIZER => "optimizer",
        RANK_REDUCE => "rank_reduce",
        ELEMENTWISE => "elementwise",
        RMS_NORM => "rms_norm",
        ROPE => "rope",
        STRIDED_COPY => "strided_copy",
    }

    /// Those that only tests run.
    #[cfg(all(test, feature = "cuda"))]
    pub(in crate::device) mod tests {
        use super::Source;

        sources! {
            FAULTS => "tests/faults",
            MMA => "tests/mma",
            TMA => "tests/tma" for "sm_90a",
            WGMMA => "tests/wgmma" for "sm_90a",
        }
    }
}

/// An entry point of a kernel file.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "nothing launches it"))]
    pub(super) source: &'static Source,
    pub(super) name: String,
}

impl Kernel {
    /// The entry point `name` of a file.
    pub(crate) fn new(source: &'static Source, name: &'static str) -> Self {
        Self { source, name: name.to_owned() }
    }

    /// The entry point's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The entry point with a computed `name`.
    pub(crate) fn named(source: &'static Source, name: String) -> Self {
        Self { source, name }
    }

    /// The entry point `name` for an element type: `name_f32`, `name_bf16` or `name_f16`.
    pub(crate) fn of_dtype(
        source: &'static Source,
        name: &'static str,
        dtype: DType,
    ) -> Result<Self, DeviceError> {
        match dtype {
            DType::F32 | DType::BF16 | DType::F16 => {
                Ok(Self { source, name: format!("{name}_{}", dtype.as_str()) })
            }
            _ => Err(DeviceError::NoKernel { kernel: name, dtype }),
        }
    }
}

/// The launch configuration of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Blocks along x (up to 2³¹ − 1), y and z (up to 65535 each). A grid with no blocks launches nothing.
    pub(crate) blocks: [usize; 3],
    /// Threads per block, along x: a multiple of 32, at most 1024.
    pub(crate) threads: u32,
    /// Dynamic shared memory per block.
    pub(crate) shared_bytes: usize,
}

impl Grid {
    /// Default number of threads per block.
    pub(crate) const THREADS: u32 = 256;

    /// One block per row.
    pub(crate) fn blocks(rows: usize) -> Self {
        Self { blocks: [rows, 1, 1], threads: Self::THREADS, shared_bytes: 0 }
    }

    /// One thread per element, in blocks of 256.
    pub(crate) fn threads(elements: usize) -> Self {
        Self::blocks(elements.div_ceil(Self::THREADS as usize))
    }

    /// Elements of a flat tensor per block: `kTile` of `cuda/common.cuh`.
    pub(crate) const TILE: usize = 4096;

    /// One block per tile of a flat tensor.
    pub(crate) fn tiles(elements: usize) -> Self {
        Self::blocks(elements.div_ceil(Self::TILE))
    }

    /// The same blocks with another number of threads.
    #[must_use]
    pub(crate) fn of_threads(self, threads: u32) -> Self {
        Self { threads, ..self }
    }

    /// The blocks in CUDA's types, or `None` if the grid is empty.
    pub(super) fn checked(self, kernel: &Kernel) -> Result<Option<[u32; 3]>, DeviceError> {
        if self.blocks.contains(&0) {
            return Ok(None);
        }
        let limits = [i32::MAX as usize, 65535, 65535];
        if self.blocks.iter().zip(limits).any(|(blocks, limit)| *blocks > limit) {
            let message = format!("a grid of {:?} blocks, at most {limits:?} are possible", self.blocks);
            return Err(DeviceError::Launch { kernel: kernel.name.clone(), message });
        }
        Ok(Some(self.blocks.map(|blocks| blocks as u32)))
    }
}

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arg<'a> {
    /// `T *` or `const T *`.
    Address(Address),
    /// `u32`.
    U32(u32),
    /// `u64`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// A struct by value: its bytes.
    Struct(&'a [u8]),
}

impl Arg<'_> {
    /// The pointer to the parameter that CUDA expects.
    pub(super) fn pointer(&self) -> *mut std::ffi::c_void {
        let pointer: *const std::ffi::c_void = match self {
            Arg::Address(address) => (&raw const address.pointer).cast(),
            Arg::U32(value) => (&raw const *value).cast(),
            Arg::U64(value) => (&raw const *value).cast(),
            Arg::F32(value) => (&raw const *value).cast(),
            Arg::Struct(bytes) => bytes.as_ptr().cast(),
        };
        pointer.cast_mut()
    }
}

impl From<Address> for Arg<'_> {
    fn from(address: Address) -> Self {
        Arg::Address(address)
    }
}

impl From<u32> for Arg<'_> {
    fn from(value: u32) -> Self {
        Arg::U32(value)
    }
}

impl From<bool> for Arg<'_> {
    fn from(value: bool) -> Self {
        Arg::U32(u32::from(value))
    }
}

impl From<u64> for Arg<'_> {
    fn from(value: u64) -> Self {
        Arg::U64(value)
    }
}

impl From<f32> for Arg<'_> {
    fn from(value: f32) -> Self {
        Arg::F32(value)
    }
}
