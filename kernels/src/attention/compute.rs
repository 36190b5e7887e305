//! [`AttentionCompute`]: attention that leaves its operands unchanged.

use super::{
    Attention, AttentionError, AttentionLayout, QkvGradients, SavedAttention, Sinks, Upstream, delta,
};
use crate::memory::{Category, with_category};
use crate::{Workspace, attention_sink};
use candle_core::Tensor;

/// The computation of attention of some queries over some keys. It leaves its operands unchanged, so that the same
/// queries can attend one block of keys after the other.
///
/// An implementation is an [`Attention`] too. Implement this trait to replace the computation of attention.
pub trait AttentionCompute: Attention {
    /// Returns `o` and `lse` for `[q, k, v]`, allocated from the `workspace`. The layout has no [sinks](super::Sinks): they
    /// enter once, after all keys.
    ///
    /// # Shapes
    /// `q [b, sq, hq, d]`, `k [b, skv, hkv, d]`, `v [b, skv, hkv, dv]` to `o [b, sq, hq, dv]` and `lse [b, hq, sq]`.
    ///
    /// # Errors
    /// Tensors that do not match the layout.
    fn attend(
        &self,
        qkv: [&Tensor; 3],
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, Tensor), AttentionError>;

    /// Returns the gradients, allocated from the `workspace`. `upstream` may be that of more keys than these; see
    /// [`Upstream`].
    ///
    /// # Errors
    /// As [`attend`](Self::attend).
    fn attend_backward(
        &self,
        qkv: [&Tensor; 3],
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<QkvGradients, AttentionError>;
}

impl<A: AttentionCompute + ?Sized> Attention for A {
    fn forward(
        &self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, SavedAttention), AttentionError> {
        let (o, lse) = self.attend([&q, &k, &v], &layout.without_sinks(), workspace)?;
        if let Some(sinks) = layout.sinks() {
            attention_sink::forward(&sinks.logits, &o, &lse)?;
        }
        Ok((o.clone(), SavedAttention { q, k, v, o, lse }))
    }

    fn backward(
        &self,
        saved: SavedAttention,
        dout: &Tensor,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<QkvGradients, AttentionError> {
        let SavedAttention { q, k, v, o, lse } = saved;
        let delta_of_rows = workspace.alloc_f32(lse.dims())?;
        with_category(Category::Other, || delta(&o, dout, &delta_of_rows))?;
        workspace.recycle(o);
        let upstream = Upstream { dout, lse: &lse, delta: &delta_of_rows };
        let gradients = self.backward_recomputed(q, k, v, &upstream, layout, workspace)?;
        [lse, delta_of_rows].into_iter().for_each(|tensor| workspace.recycle(tensor));
        Ok(gradients)
    }

    fn backward_recomputed(
        &self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<QkvGradients, AttentionError> {
        if let Some(Sinks { logits, gradient: Some(gradient) }) = layout.sinks() {
            attention_sink::backward(logits, upstream.lse, upstream.delta, gradient)?;
        }
        let gradients = self.attend_backward([&q, &k, &v], upstream, &layout.without_sinks(), workspace)?;
        [q, k, v].into_iter().for_each(|tensor| workspace.recycle(tensor));
        Ok(gradients)
    }
}
