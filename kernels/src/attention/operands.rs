//! The tensors of a call: what attention reads and where it writes.

use super::AttentionLayout;
use candle_core::Tensor;

/// What both directions read.
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
    /// Which keys each query sees, and which KV head each query head uses.
    pub layout: &'a AttentionLayout,
}

/// What backward reads besides. `lse` and `delta` may cover more keys than the operands do: with those of the
/// whole row, the gradients of a row's key shards sum to the gradients of the row (ring attention).
#[derive(Debug, Clone, Copy)]
pub struct Upstream<'a> {
    /// Gradient of the output, `[b, sq, hq, d]`.
    pub dout: &'a Tensor,
    /// Logarithm of each query's softmax denominator, `[b, hq, sq]`.
    pub lse: &'a Tensor,
    /// Row sums of `o * dout`, `[b, hq, sq]`; see [`delta`](super::delta).
    pub delta: &'a Tensor,
}

/// Where backward writes; what was there is overwritten.
#[derive(Debug, Clone, Copy)]
pub struct Gradients<'a> {
    /// Gradient of the queries, `[b, sq, hq, d]`.
    pub dq: &'a Tensor,
    /// Gradient of the keys, summed over the query heads that share a KV head, `[b, skv, hkv, d]`.
    pub dk: &'a Tensor,
    /// Gradient of the values, likewise.
    pub dv: &'a Tensor,
}
