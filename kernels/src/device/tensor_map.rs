//! Maps of tensors, from which kernels copy tiles by TMA (`cuda/tma.cuh`).

use super::{Address, Arg};
use candle_core::DType;

/// A tensor's elements in a row of a tile: `kPanel` of `cuda/wgmma.cuh`.
const PANEL: usize = 64;

/// A `CUtensorMap`.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct TensorMap([u8; 128]);

impl TensorMap {
    /// The kernel's parameter `BY_VALUE(TensorMap)`.
    pub(crate) fn arg(&self) -> Arg<'_> {
        Arg::Struct(&self.0)
    }

    /// The map of no tensor.
    pub(super) fn empty() -> Self {
        Self([0; 128])
    }

    /// The place that an encoder writes to.
    #[cfg(feature = "cuda")]
    pub(super) fn as_mut_ptr(&mut self) -> *mut std::ffi::c_void {
        self.0.as_mut_ptr().cast()
    }
}

/// A tensor of 16-bit elements and its tiles, in CUDA's order: the innermost dimension first.
#[derive(Debug)]
pub(super) struct TiledTensor {
    pub(super) address: Address,
    pub(super) extents: [u64; 4],
    /// In bytes, of all dimensions but the innermost.
    pub(super) strides: [u64; 3],
    pub(super) tile: [u32; 4],
}

impl TiledTensor {
    /// A contiguous tensor `[sequence, row, head, head_dim]`, and tiles of `rows` rows of a head, 64 elements of each.
    pub(super) fn new(address: Address, dims: [usize; 4], rows: usize) -> Self {
        debug_assert!(matches!(address.dtype, DType::BF16 | DType::F16), "16-bit floats");
        let [sequences, tokens, heads, head_dim] = dims;
        let row = (head_dim * address.dtype.size_in_bytes()) as u64;
        let (token, sequence) = (row * heads as u64, row * (heads * tokens) as u64);
        Self {
            address,
            extents: [head_dim, heads, tokens, sequences].map(|extent| extent as u64),
            strides: [row, token, sequence],
            tile: [PANEL, 1, rows, 1].map(|extent| extent as u32),
        }
    }
}
