//! Causal attention over packed rows, forward and backward, in memory linear in the sequence length.
//!
//! * [`Geometry`] says which keys each query sees: causal, per document, optionally within a sliding window,
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
mod geometry;
mod kernels;
pub mod reference;
#[cfg(test)]
mod tests;

pub use error::AttentionError;
pub use geometry::{Geometry, VisibleRanges, grouped_heads};
pub use kernels::{Gradients, Operands, Upstream, backward, delta, forward};

use super::Workspace;
use crate::memory::{Category, counted_as, counted_by_default_as};
use crate::tensor::zeros;
use candle_core::{DType, Tensor};

/// Attention of a layer's queries over its keys, with a hand-written backward.
///
/// Implementations differ in where heads and tokens live, not in what they compute.
pub trait Attention: Send + Sync {
    /// Returns `o` and what [`Attention::backward`] needs.
    ///
    /// `q`, `k` and `v` are the implementation's to keep or to overwrite: candle tensors share their storage,
    /// so a clone that the caller holds on to may change.
    ///
    /// # Shapes
    /// `q [b, sq, hq, d]`, `k, v [b, skv, hkv, d]` to `o [b, sq, hq, d]`.
    ///
    /// # Errors
    /// When the tensors do not fit the geometry, or when the implementation's communication fails.
    fn forward(
        &self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        geometry: &Geometry,
    ) -> Result<(Tensor, SavedAttention), AttentionError>;

    /// Returns `(dq, dk, dv)` for the gradient `dout` of the loss with respect to `o`.
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
        geometry: &Geometry,
    ) -> Result<(Tensor, Tensor, Tensor), AttentionError>;

    /// As [`forward`](Self::forward); what it makes may come out of `workspace`.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    fn forward_in(
        &self,
        workspace: &Workspace,
        qkv: [Tensor; 3],
        geometry: &Geometry,
    ) -> Result<(Tensor, SavedAttention), AttentionError> {
        let (_, [q, k, v]) = (workspace, qkv);
        self.forward(q, k, v, geometry)
    }

    /// As [`backward`](Self::backward); what it makes may come out of `workspace`.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    fn backward_in(
        &self,
        workspace: &Workspace,
        saved: SavedAttention,
        dout: &Tensor,
        geometry: &Geometry,
    ) -> Result<(Tensor, Tensor, Tensor), AttentionError> {
        let _ = workspace;
        self.backward(saved, dout, geometry)
    }
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

/// Where attention has its outputs from. What they hold is overwritten.
#[derive(Clone, Copy)]
enum Outputs<'a> {
    Fresh,
    In(&'a Workspace),
}

impl Outputs<'_> {
    /// Of the element type and device of `like`; counted as activations unless the caller counts them as its own.
    fn like(self, like: &Tensor) -> Result<Tensor, AttentionError> {
        match self {
            Self::In(workspace) if workspace.makes(like) => Ok(workspace.take(like.shape())?),
            _ => {
                let fresh = || zeros(like.shape(), like.dtype(), like.device());
                Ok(counted_by_default_as(Category::Activations, fresh)?)
            }
        }
    }

    /// A number for each query, in f32, on the device of `q`.
    fn rows(self, q: &Tensor) -> Result<Tensor, AttentionError> {
        let (b, sq, hq, _) = q.dims4()?;
        match self {
            Self::In(workspace) if workspace.makes(q) => Ok(workspace.take_f32((b, hq, sq))?),
            _ => {
                let fresh = || zeros((b, hq, sq), DType::F32, q.device());
                Ok(counted_by_default_as(Category::Activations, fresh)?)
            }
        }
    }
}

/// Bytes of working memory that each CPU thread keeps once it has computed a forward (or, with `backward`, a
/// backward) pass over rows of `num_tokens` tokens.
#[must_use]
pub fn scratch_bytes(num_tokens: usize, head_dim: usize, backward: bool) -> usize {
    cpu::scratch_bytes(num_tokens, head_dim, backward)
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

    fn run(
        outputs: Outputs<'_>,
        [q, k, v]: [Tensor; 3],
        geometry: &Geometry,
    ) -> Result<(Tensor, SavedAttention), AttentionError> {
        let (o, lse) = (outputs.like(&q)?, outputs.rows(&q)?);
        let operands = Operands { q: &q, k: &k, v: &v, scale: Self::scale(&q)?, geometry };
        counted_as(Category::Other, || forward(&operands, &o, &lse))?;
        Ok((o.clone(), SavedAttention { q, k, v, o, lse }))
    }

    fn run_backward(
        outputs: Outputs<'_>,
        saved: SavedAttention,
        dout: &Tensor,
        geometry: &Geometry,
    ) -> Result<(Tensor, Tensor, Tensor), AttentionError> {
        let SavedAttention { q, k, v, o, lse } = saved;
        let delta_of_rows = outputs.rows(&q)?;
        counted_as(Category::Other, || delta(&o, dout, &delta_of_rows))?;
        drop(o);
        let (dq, dk, dv) = (outputs.like(&q)?, outputs.like(&k)?, outputs.like(&v)?);
        let operands = Operands { q: &q, k: &k, v: &v, scale: Self::scale(&q)?, geometry };
        let upstream = Upstream { dout, lse: &lse, delta: &delta_of_rows };
        let gradients = Gradients { dq: &dq, dk: &dk, dv: &dv };
        counted_as(Category::Other, || backward(&operands, &upstream, &gradients))?;
        Ok((dq, dk, dv))
    }
}

impl Attention for FlashAttention {
    fn forward(
        &self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        geometry: &Geometry,
    ) -> Result<(Tensor, SavedAttention), AttentionError> {
        Self::run(Outputs::Fresh, [q, k, v], geometry)
    }

    fn backward(
        &self,
        saved: SavedAttention,
        dout: &Tensor,
        geometry: &Geometry,
    ) -> Result<(Tensor, Tensor, Tensor), AttentionError> {
        Self::run_backward(Outputs::Fresh, saved, dout, geometry)
    }

    fn forward_in(
        &self,
        workspace: &Workspace,
        qkv: [Tensor; 3],
        geometry: &Geometry,
    ) -> Result<(Tensor, SavedAttention), AttentionError> {
        Self::run(Outputs::In(workspace), qkv, geometry)
    }

    fn backward_in(
        &self,
        workspace: &Workspace,
        saved: SavedAttention,
        dout: &Tensor,
        geometry: &Geometry,
    ) -> Result<(Tensor, Tensor, Tensor), AttentionError> {
        Self::run_backward(Outputs::In(workspace), saved, dout, geometry)
    }
}
