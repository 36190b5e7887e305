//! The tensors of a call, and the kernels that compute it.

use super::{AttentionError, AttentionLayout, dims::Dims};
use crate::arg_check::{ArgCheck, Argument};
use candle_core::{DType, Tensor};

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

/// Operands that match each other and the layout, and their sizes.
pub(super) struct Problem<'a> {
    pub(super) operands: Operands<'a>,
    pub(super) dims: Dims,
}

impl<'a> Problem<'a> {
    pub(super) fn new(call: ArgCheck, operands: &Operands<'a>) -> Result<Self, AttentionError> {
        let Operands { q, k, v, layout, .. } = *operands;
        let (_, _, num_kv_heads, _) = k.dims4()?;
        let (_, _, _, head_dim) = q.dims4()?;
        let dims = Dims {
            batch: layout.batch(),
            num_queries: layout.num_queries(),
            num_keys: layout.num_keys(),
            num_heads: layout.q_to_kv().len(),
            num_kv_heads,
            head_dim: head_dim.max(1),
        };
        expect(call, &dims.q_shape(), &[("q", q)])?;
        expect(call, &dims.kv_shape(), &[("k", k), ("v", v)])?;
        for (q_head, &kv_head) in layout.q_to_kv().iter().enumerate() {
            if kv_head >= num_kv_heads {
                return Err(AttentionError::NoSuchKvHead { op: call.op, q_head, kv_head, num_kv_heads });
            }
        }
        Ok(Self { operands: *operands, dims })
    }

    /// Element type of all tensors but `lse` and `delta`, which are f32.
    pub(super) fn dtype(&self) -> DType {
        self.operands.q.dtype()
    }
}

/// Checks that the tensors have exactly this shape.
pub(super) fn expect(
    call: ArgCheck,
    shape: &[usize],
    tensors: &[Argument<'_>],
) -> Result<(), AttentionError> {
    let Some(&(tensor, found)) = tensors.iter().find(|(_, tensor)| tensor.dims() != shape) else {
        return Ok(());
    };
    let (expected, got) = (shape.to_vec(), found.dims().to_vec());
    Err(AttentionError::Shape { op: call.op, tensor, expected, got })
}
