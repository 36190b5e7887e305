//! Causal attention over packed sequences, forward and backward, with memory linear in the sequence length.
//!
//! * [`AttentionLayout`]: which keys each query sees. Causal, per document, with an optional sliding window,
//!   for any part of a sequence.
//! * [`Attention`]: the trait that layers call. [`FlashAttention`] computes it on this rank alone, as an
//!   [`AttentionCompute`]; sequence parallelism wraps that in other implementations.
//! * [`forward`], [`delta`] and [`backward`]: the kernels, which write to the caller's outputs; [`merge`] joins
//!   attention over several sets of keys.
//! * [`mod@reference`]: a slow, simple version that the tests compare the kernels with.
//!
//! The folder's `README.md` explains the algorithm.
//!
//! # Shapes
//! `b` sequences, `sq` local queries, `skv` local keys, `hq` query heads, `hkv` KV heads, `d` head dimension:
//! `q`, `o` are `[b, sq, hq, d]`, `k`, `v` are `[b, skv, hkv, d]`, `lse` and `delta` are `[b, hq, sq]`. A
//! gradient has the shape of its tensor. An [`Attention`] also takes values of fewer elements per head than queries, as in latent attention:
//! `v` and `o` then have these. [`FlashAttention`] widens them with zeros for its kernels.

mod blocks;
mod choice;
mod compute;
mod cpu;
mod cuda;
mod dims;
mod error;
mod fused;
mod kernels;
mod layout;
mod logits;
mod on_cpu;
mod operands;
mod pair_count;
pub mod reference;
mod self_check;
mod steps;
#[cfg(test)]
mod tests;
mod value_width;
mod visible_ranges;

pub use choice::{CheckedKernels, ChosenKernels};
pub use compute::AttentionCompute;
pub use error::AttentionError;
pub use kernels::{backward, delta, forward, merge};
pub use layout::{AttentionLayout, grouped_heads};
pub use logits::{Logits, Sinks};
pub use operands::{AttentionKernels, Gradients, Operands, Upstream};
pub use steps::{Attend, QkvGradients, Returning, StartedBackward, StartedForward, StartedRecomputed};
pub use visible_ranges::VisibleRanges;

use crate::Workspace;
use crate::memory::{Category, with_category};
use candle_core::Tensor;

/// Attention with a hand-written backward pass.
///
/// Implementations differ in how heads and tokens are sharded, not in the result.
///
/// Each method has a form in steps, `start_*`, with which a caller overlaps the communication of one call with
/// the computation of another. All ranks run the same steps in the same order. Tensors passed to `start_*` must
/// not change until the second step has run.
pub trait Attention: Send + Sync {
    /// Returns `o` and the state for [`Attention::backward`].
    ///
    /// With [sinks](Sinks), output and log-denominators are those with sinks.
    ///
    /// The implementation may keep or overwrite `q`, `k` and `v`. Clones of a candle tensor share its
    /// storage, so a clone that the caller keeps may change. Results are allocated from the `workspace`.
    ///
    /// # Shapes
    /// `q [b, sq, hq, d]`, `k [b, skv, hkv, d]`, `v [b, skv, hkv, dv]` to `o [b, sq, hq, dv]`, where `dv` is at most `d`.
    ///
    /// # Errors
    /// Tensors that do not match the layout, or failed communication.
    fn forward(
        &self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, SavedAttention), AttentionError>;

    /// Returns the gradients for the gradient `dout` of the loss with respect to `o`. They are allocated
    /// from the `workspace`. `saved` is recycled, so its tensors must have no other users. Adds to the gradient of the layout's
    /// [sinks](Sinks), if there are any: that of this rank's heads and tokens.
    ///
    /// # Shapes
    /// `dout [b, sq, hq, dv]` to the shapes of `q`, `k` and `v`.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    fn backward(
        &self,
        saved: SavedAttention,
        dout: &Tensor,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<QkvGradients, AttentionError>;

    /// As [`backward`](Self::backward), for a forward pass of which only `o` and [`SavedAttention::lse`] were
    /// saved: with `q`, `k` and `v` computed again. `upstream` contains that `lse`, and [`delta`] of `o` and
    /// `dout`. The implementation may overwrite `q`, `k` and `v`.
    ///
    /// # Shapes
    /// `q`, `k`, `v` and `dout` as for [`forward`](Self::forward); `delta [b, hq, sq]`.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    fn backward_recomputed(
        &self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<QkvGradients, AttentionError>;

    /// Starts [`forward`](Self::forward).
    ///
    /// # Errors
    /// As [`Attention::forward`].
    fn start_forward<'a>(
        &'a self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: &AttentionLayout,
        workspace: &'a Workspace,
    ) -> Result<StartedForward<'a>, AttentionError> {
        let layout = layout.clone();
        Ok(Box::new(move |()| {
            let (o, saved) = self.forward(q, k, v, &layout, workspace)?;
            Ok((saved, Returning::Ready(o)))
        }))
    }

    /// Starts [`backward`](Self::backward), whose saved state the second step takes.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    fn start_backward<'a>(
        &'a self,
        dout: &Tensor,
        layout: &AttentionLayout,
        workspace: &'a Workspace,
    ) -> Result<StartedBackward<'a>, AttentionError> {
        let (dout, layout) = (dout.clone(), layout.clone());
        Ok(Box::new(move |saved| Ok(Returning::Ready(self.backward(saved, &dout, &layout, workspace)?))))
    }

    /// Starts [`backward_recomputed`](Self::backward_recomputed).
    ///
    /// # Errors
    /// As [`Attention::forward`].
    fn start_backward_recomputed<'a>(
        &'a self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &'a Workspace,
    ) -> Result<StartedRecomputed<'a>, AttentionError> {
        let layout = layout.clone();
        let [dout, lse, delta] = [upstream.dout, upstream.lse, upstream.delta].map(Tensor::clone);
        Ok(Box::new(move |()| {
            let upstream = Upstream { dout: &dout, lse: &lse, delta: &delta };
            Ok(Returning::Ready(self.backward_recomputed(q, k, v, &upstream, &layout, workspace)?))
        }))
    }
}

/// State that a forward pass saves for its backward pass.
#[derive(Debug, Clone)]
pub struct SavedAttention {
    /// Queries `[b, sq, hq, d]`.
    pub q: Tensor,
    /// Keys `[b, skv, hkv, d]`.
    pub k: Tensor,
    /// Values `[b, skv, hkv, dv]`.
    pub v: Tensor,
    /// Output `[b, sq, hq, dv]`.
    pub o: Tensor,
    /// Logarithm of each query's softmax denominator, `[b, hq, sq]`; -inf for a query without visible keys.
    pub lse: Tensor,
}

impl SavedAttention {
    /// Bytes of all its tensors, even if others share them.
    pub fn bytes(&self) -> usize {
        [&self.q, &self.k, &self.v, &self.o, &self.lse]
            .iter()
            .map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes())
            .sum()
    }
}

/// Attention on this rank alone.
///
/// Runs on the tensors' device; on a CPU in the current rayon pool. Results do not depend on the number of
/// threads.
#[derive(Debug, Clone, Copy, Default)]
pub struct FlashAttention {
    kernels: ChosenKernels,
}

impl FlashAttention {
    /// Attention with these kernels, if its tensors are on a GPU.
    pub fn new(kernels: impl Into<ChosenKernels>) -> Self {
        Self { kernels: kernels.into() }
    }

    /// The factor on the logits for a `q [b, sq, hq, d]`.
    fn scale(q: &Tensor, layout: &AttentionLayout) -> Result<f32, AttentionError> {
        let (_, _, _, head_dim) = q.dims4()?;
        Ok(layout.logits().scale.unwrap_or((1.0 / (head_dim as f64).sqrt()) as f32))
    }
}

impl AttentionCompute for FlashAttention {
    fn attend(
        &self,
        [q, k, v]: [&Tensor; 3],
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, Tensor), AttentionError> {
        let (b, sq, hq, head_dim) = q.dims4()?;
        let width = v.dim(3)?;
        let wide_v = value_width::widened(v, head_dim, workspace)?;
        let (o, lse) = (workspace.alloc(q.dims())?, workspace.alloc_f32((b, hq, sq))?);
        let kernels = self.kernels.for_head_dim(head_dim);
        let operands = Operands { q, k, v: &wide_v, scale: Self::scale(q, layout)?, layout, kernels };
        with_category(Category::Other, || forward(&operands, &o, &lse))?;
        value_width::recycle_copy(wide_v, v, workspace);
        Ok((value_width::narrowed(o, width, workspace)?, lse))
    }

    fn attend_backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<QkvGradients, AttentionError> {
        let [head_dim, width] = [q.dim(3)?, v.dim(3)?];
        let [wide_v, wide_dout] = [v, upstream.dout].map(|x| value_width::widened(x, head_dim, workspace));
        let (wide_v, wide_dout) = (wide_v?, wide_dout?);
        let (dq, dk, dv) =
            (workspace.alloc(q.dims())?, workspace.alloc(k.dims())?, workspace.alloc(wide_v.dims())?);
        let kernels = self.kernels.for_head_dim(head_dim);
        let operands = Operands { q, k, v: &wide_v, scale: Self::scale(q, layout)?, layout, kernels };
        let wide_upstream = Upstream { dout: &wide_dout, ..*upstream };
        let gradients = Gradients { dq: &dq, dk: &dk, dv: &dv };
        with_category(Category::Other, || backward(&operands, &wide_upstream, &gradients))?;
        value_width::recycle_copy(wide_v, v, workspace);
        value_width::recycle_copy(wide_dout, upstream.dout, workspace);
        Ok(QkvGradients { dq, dk, dv: value_width::narrowed(dv, width, workspace)? })
    }
}
