//! Causal attention over packed rows, forward and backward, in memory linear in the sequence length.
//!
//! * [`AttentionLayout`] says which keys each query sees: causal, per document, optionally within a sliding window,
//!   for any part of a row.
//! * [`Attention`] is what layers call; [`FlashAttention`] computes it on this rank alone, and sequence
//!   parallelism wraps it in another implementation.
//! * [`forward`], [`delta`] and [`backward`] are the kernels, writing to outputs of the caller's.
//! * [`mod@reference`] is the slow, obvious version that the tests hold the kernels against.
//!
//! The algorithm is explained in the `README.md` beside this file.
//!
//! # Shapes
//! `b` batch rows, `sq` local queries, `skv` local keys, `hq` query heads, `hkv` KV heads, `d` head dimension:
//! `q`, `o` are `[b, sq, hq, d]`, `k`, `v` are `[b, skv, hkv, d]`, `lse` and `delta` are `[b, hq, sq]`, and a
//! gradient has the shape of what it is the gradient of.

mod blocks;
mod cpu;
mod cuda;
mod dims;
mod error;
mod layout;
mod kernels;
mod on_cpu;
mod operands;
pub mod reference;
#[cfg(test)]
mod tests;

pub use error::AttentionError;
pub use layout::{AttentionLayout, VisibleRanges, grouped_heads};
pub use kernels::{backward, delta, forward};
pub use operands::{Gradients, Operands, Upstream};

use crate::Workspace;
use crate::memory::{Category, with_category};
use candle_core::Tensor;

/// Attention of a layer's queries over its keys, with a hand-written backward.
///
/// Implementations differ in where heads and tokens live, not in what they compute.
pub trait Attention: Send + Sync {
    /// Returns `o` and what [`Attention::backward`] needs.
    ///
    /// `q`, `k` and `v` are the implementation's to keep or to overwrite: candle tensors share their storage,
    /// so a clone that the caller holds on to may change. Results come from the `workspace`.
    ///
    /// # Shapes
    /// `q [b, sq, hq, d]`, `k, v [b, skv, hkv, d]` to `o [b, sq, hq, d]`.
    ///
    /// # Errors
    /// When the tensors do not fit the layout, or when the implementation's communication fails.
    fn forward(
        &self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, SavedAttention), AttentionError>;

    /// Returns `(dq, dk, dv)` for the gradient `dout` of the loss with respect to `o`. They come from the
    /// `workspace`, to which `saved` goes: nobody else may use its tensors any more.
    ///
    /// # Shapes
    /// `dout [b, sq, hq, d]` to the shapes of `q`, `k` and `v`.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    fn backward(
        &self,
        saved: SavedAttention,
        dout: &Tensor,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, Tensor, Tensor), AttentionError>;
}

/// What a forward pass keeps for its backward pass.
#[derive(Debug, Clone)]
pub struct SavedAttention {
    /// Queries `[b, sq, hq, d]`.
    pub q: Tensor,
    /// Keys `[b, skv, hkv, d]`.
    pub k: Tensor,
    /// Values `[b, skv, hkv, d]`.
    pub v: Tensor,
    /// Output `[b, sq, hq, d]`.
    pub o: Tensor,
    /// Logarithm of each query's softmax denominator, `[b, hq, sq]`; -inf for a query that sees nothing.
    pub lse: Tensor,
}

impl SavedAttention {
    /// Bytes of all its tensors, whoever else may hold them as well.
    pub fn bytes(&self) -> usize {
        [&self.q, &self.k, &self.v, &self.o, &self.lse]
            .iter()
            .map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes())
            .sum()
    }
}

/// Attention on this rank alone, with `scale = 1 / sqrt(head_dim)`.
///
/// Runs on the tensors' device, on a CPU in the current rayon pool; the results do not depend on its number of
/// threads.
#[derive(Debug, Clone, Copy, Default)]
pub struct FlashAttention;

impl FlashAttention {
    /// The factor on the logits for a `q [b, sq, hq, d]`.
    fn scale(q: &Tensor) -> Result<f32, AttentionError> {
        let (_, _, _, head_dim) = q.dims4()?;
        Ok((1.0 / (head_dim as f64).sqrt()) as f32)
    }
}

impl Attention for FlashAttention {
    fn forward(
        &self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, SavedAttention), AttentionError> {
        let (b, sq, hq, _) = q.dims4()?;
        let (o, lse) = (workspace.alloc(q.dims())?, workspace.alloc_f32((b, hq, sq))?);
        let operands = Operands { q: &q, k: &k, v: &v, scale: Self::scale(&q)?, layout };
        with_category(Category::Other, || forward(&operands, &o, &lse))?;
        Ok((o.clone(), SavedAttention { q, k, v, o, lse }))
    }

    fn backward(
        &self,
        saved: SavedAttention,
        dout: &Tensor,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, Tensor, Tensor), AttentionError> {
        let SavedAttention { q, k, v, o, lse } = saved;
        let delta_of_rows = workspace.alloc_f32(lse.dims())?;
        with_category(Category::Other, || delta(&o, dout, &delta_of_rows))?;
        workspace.recycle(o);
        let (dq, dk, dv) = (workspace.alloc(q.dims())?, workspace.alloc(k.dims())?, workspace.alloc(v.dims())?);
        let operands = Operands { q: &q, k: &k, v: &v, scale: Self::scale(&q)?, layout };
        let upstream = Upstream { dout, lse: &lse, delta: &delta_of_rows };
        let gradients = Gradients { dq: &dq, dk: &dk, dv: &dv };
        with_category(Category::Other, || backward(&operands, &upstream, &gradients))?;
        [q, k, v, lse, delta_of_rows].into_iter().for_each(|tensor| workspace.recycle(tensor));
        Ok((dq, dk, dv))
    }
}
