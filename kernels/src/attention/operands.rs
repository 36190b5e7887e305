//! The tensors of a call, and the kernels that compute it.

use super::AttentionLayout;
use candle_core::Tensor;

/// The kernels that compute attention on a GPU. The CPU has one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AttentionKernels {
    /// The fused kernels for the calls that they support, the tiled ones for the others.
    Auto,
    /// As `Auto`, with the kernels of compute capability 9.0 for the calls that they support.
    Wgmma,
    /// The fused kernels of every GPU; a call that they do not support is an error.
    Fused,
    /// Matmuls by cuBLAS, and kernels for the steps in between.
    #[default]
    Tiled,
}

/// Inputs of both directions.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// Queries `[b, sq, hq, d]`.
    pub q: &'a Tensor,
    /// Keys `[b, skv, hkv, d]`.
    pub k: &'a Tensor,
    /// Values `[b, skv, hkv, d]`.
    pub v: &'a Tensor,
    /// Factor on the logits, usually `1 / sqrt(d)`.
    pub scale: f32,
    /// The visible keys of each query, the KV head of each query head, and the soft cap of the logits.
    pub layout: &'a AttentionLayout,
    /// The kernels on a GPU.
    pub kernels: AttentionKernels,
}

/// Inputs of the backward pass in addition to [`Operands`]. `lse` and `delta` may cover more keys than the
/// operands. With those of the whole sequence, the gradients of its key shards sum to the gradients of the
/// sequence (ring attention).
#[derive(Debug, Clone, Copy)]
pub struct Upstream<'a> {
    /// Gradient of the output, `[b, sq, hq, d]`.
    pub dout: &'a Tensor,
    /// Logarithm of each query's softmax denominator, `[b, hq, sq]`.
    pub lse: &'a Tensor,
    /// Row sums of `o * dout`, `[b, hq, sq]`; see [`delta`](super::delta).
    pub delta: &'a Tensor,
}

/// Outputs of the backward pass, which are overwritten.
#[derive(Debug, Clone, Copy)]
pub struct Gradients<'a> {
    /// Gradient of the queries, `[b, sq, hq, d]`.
    pub dq: &'a Tensor,
    /// Gradient of the keys, summed over the query heads that share a KV head, `[b, skv, hkv, d]`.
    pub dk: &'a Tensor,
    /// Gradient of the values, summed likewise.
    pub dv: &'a Tensor,
}
