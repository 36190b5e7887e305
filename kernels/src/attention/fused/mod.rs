//! Fused attention on a GPU: kernels that keep scores in registers, for 16-bit elements and usual head dimensions.
//!
//! The kernels are in `cuda/attention_fused_*.cu`. The [tiled path](super::cuda) computes everything else.

mod backward;
mod backward_wgmma;
mod forward;
mod forward_wgmma;

pub(super) use backward::backward;
pub(super) use forward::forward;

use super::AttentionError;
use super::cuda::{HeadChunk, Tiling};
use super::dims::Dims;
use super::operands::{AttentionKernels, Operands, Problem};
use crate::device::{Address, Arg, DeviceError, Grid, Launcher, Source, Target, TensorMap};
use candle_core::{DType, Device, Tensor};
use std::sync::Once;

/// Threads per block: `kFusedThreads` of `cuda/attention_fused.cuh`.
const THREADS: u32 = 128;

/// The same with products of warpgroups: `kThreadsWithProducer` of `cuda/attention_fused_wgmma.cuh`.
const THREADS_WITH_PRODUCER: u32 = 384;

/// Keys or packed rows of a block with products of warpgroups: `kOwn` of the same file.
pub(super) const WGMMA_ROWS: usize = 128;

/// The head dimensions that have kernels.
pub(super) const HEAD_DIMS: [usize; 3] = [64, 96, 128];

/// Those that have kernels with products of warpgroups; others use the kernels of every GPU.
pub(super) const HEAD_DIMS_OF_WGMMA: [usize; 2] = [64, 128];

/// Elements of 16 bytes, the unit of all copies.
const CHUNK: usize = 8;

/// Bytes of the barriers of a stage of keys or of values in `Ring` of `cuda/attention_fused_wgmma.cuh`.
const BARRIERS: usize = 2 * size_of::<u64>();

/// Bytes of a packed row in `RowTerms` of `cuda/attention_fused_backward.cuh`.
const TERM: usize = 16;

/// The blocks of a kernel.
struct Block {
    /// The kernel's file, which begins the names of its entry points.
    source: &'static Source,
    threads: u32,
    /// Packed rows or keys.
    rows: usize,
    /// Rows of `head_dim` elements in shared memory.
    shared_rows: usize,
    /// Bytes of shared memory besides.
    more_bytes: usize,
    /// Keys per tile, if the kernel copies keys and values by TMA.
    tma_keys: Option<usize>,
}

impl Block {
    /// The block with products of warpgroups, if the call is to use them and they support its head dimension; else this
    /// one.
    fn or_wgmma(self, of_wgmma: Self, kernels: AttentionKernels, head_dim: usize) -> Self {
        let is_chosen = kernels == AttentionKernels::Wgmma && HEAD_DIMS_OF_WGMMA.contains(&head_dim);
        if is_chosen { of_wgmma } else { self }
    }

    /// Makes the maps of keys and values from which the kernel copies tiles, if it copies by TMA.
    fn maps(
        &self,
        launcher: &Launcher,
        dims: &Dims,
        k: Address,
        v: Address,
    ) -> Result<Option<[TensorMap; 2]>, DeviceError> {
        let Some(keys) = self.tma_keys else { return Ok(None) };
        let map = |address| launcher.tensor_map(address, dims.kv_shape(), keys);
        Ok(Some([map(k)?, map(v)?]))
    }
}

/// Checks that a device has fused kernels for an element type. All GPUs that can be opened have their instructions:
/// those of `cuda/common.cuh` need compute capability 8.0, too.
pub(super) fn check_support(device: &Device, dtype: DType) -> Result<(), AttentionError> {
    let found = if !is_16_bits(dtype) {
        format!("{} elements", dtype.as_str())
    } else if !matches!(Target::of(device), Ok(Target::Kernels(_))) {
        "the CPU".to_owned()
    } else {
        return Ok(());
    };
    Err(AttentionError::NotFused { op: "attention", found })
}

fn is_16_bits(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// Returns whether the fused kernels are to compute a problem; `others` are the other tensors of its element type.
///
/// # Errors
/// A problem that they do not support, if they are forced.
pub(super) fn is_chosen(
    op: &'static str,
    problem: &Problem<'_>,
    others: &[&Tensor],
) -> Result<bool, AttentionError> {
    match (problem.operands.kernels, unsupported(problem, others)) {
        (AttentionKernels::Tiled, _) => Ok(false),
        (AttentionKernels::Auto | AttentionKernels::Wgmma, Some(found)) => {
            warn_of_tiled(problem, &found);
            Ok(false)
        }
        (_, None) => Ok(true),
        (AttentionKernels::Fused, Some(found)) => Err(AttentionError::NotFused { op, found }),
    }
}

/// Warns once if there are fused kernels for a problem's elements and head dimension, but it has another property.
fn warn_of_tiled(problem: &Problem<'_>, found: &str) {
    static WARNED: Once = Once::new();
    if is_16_bits(problem.dtype()) && HEAD_DIMS.contains(&problem.dims.head_dim) {
        WARNED.call_once(|| {
            tracing::warn!("attention with {found} runs on the tiled kernels, which are slower")
        });
    }
}

/// The first property of a problem that the fused kernels do not support.
fn unsupported(problem: &Problem<'_>, others: &[&Tensor]) -> Option<String> {
    let Problem { operands: Operands { q, k, v, scale, layout, .. }, dims } = *problem;
    let dtype = problem.dtype();
    if !is_16_bits(dtype) {
        return Some(format!("{} elements", dtype.as_str()));
    }
    if !HEAD_DIMS.contains(&dims.head_dim) {
        return Some(format!("a head dimension of {}", dims.head_dim));
    }
    if layout.logits().softcap.is_some() {
        return Some("a soft cap of the logits".to_owned());
    }
    let tensors = [q, k, v].into_iter().chain(others.iter().copied());
    let offsets = tensors.map(|tensor| tensor.layout().start_offset());
    if let Some(offset) = offsets.into_iter().find(|offset| offset % CHUNK != 0) {
        return Some(format!(
            "a tensor that begins {} bytes into its storage",
            offset * dtype.size_in_bytes()
        ));
    }
    if !(scale > 0.0 && scale.is_finite()) {
        return Some(format!("a scale of {scale}"));
    }
    // The kernels count rows and keys, and those of a tile past the end, in 32 bits.
    let (rows, keys) = (dims.num_queries * dims.num_heads, dims.num_keys);
    (rows.max(keys) > i32::MAX as usize).then(|| format!("{rows} queries of all heads and {keys} keys"))
}

/// All KV heads that a query head uses, by adjacent ones with equally many query heads: one launch each.
fn head_chunks(problem: &Problem<'_>) -> Vec<HeadChunk> {
    let Problem { operands, dims } = problem;
    let unlimited = Tiling { heads: usize::MAX, ..Tiling::FORWARD };
    unlimited.head_chunks(operands.layout.q_to_kv(), dims, dims.num_kv_heads)
}

/// The sizes of a launch: the fields of `FusedSizes` in `cuda/attention_fused.cuh`.
fn sizes(problem: &Problem<'_>, chunk: &HeadChunk) -> [Arg<'static>; 6] {
    let dims = problem.dims;
    let sizes = [dims.num_queries, dims.num_keys, dims.num_heads, dims.num_kv_heads];
    let [tokens, keys, heads, kv_heads] = sizes.map(|size| (size as u32).into());
    [tokens, keys, heads, kv_heads, (chunk.first_kv_head as u32).into(), (chunk.group as u32).into()]
}

/// Blocks for `rows` packed rows or keys of every KV head of a chunk and every sequence.
fn grid(problem: &Problem<'_>, chunk: &HeadChunk, block: &Block, rows: usize) -> Grid {
    let (dims, element_bytes) = (problem.dims, problem.dtype().size_in_bytes());
    let shared_bytes = block.shared_rows * dims.head_dim * element_bytes + block.more_bytes;
    Grid {
        blocks: [rows.div_ceil(block.rows), chunk.num_kv_heads, dims.batch],
        threads: block.threads,
        shared_bytes,
    }
}
