//! The projection of tokens to heads of queries, keys or values, with a norm.

use super::QkNorm;
use crate::nn::linear::{LinearGradients, LinearRows};
use crate::nn::{BackwardPass, ForwardPass, LayerError, Linear, Norm, ParameterList};
use candle_core::Tensor;
use std::ops::Range;

/// A linear layer to `heads · outputs_per_head` outputs, then a norm if there is one.
///
/// Projections work on a tile of tokens and some heads, norms on all tokens.
#[derive(Debug)]
pub(super) struct HeadProjection {
    pub(super) linear: Linear,
    pub(super) norm: Option<HeadNorm>,
    pub(super) head_dim: usize,
    /// `head_dim`, or twice as many with a gate.
    pub(super) outputs_per_head: usize,
}

/// A norm of queries, keys or values.
#[derive(Debug)]
pub(super) struct HeadNorm {
    pub(super) norm: Norm,
    pub(super) over: QkNorm,
}

impl HeadNorm {
    /// `[batch, seq_local, heads, head_dim]` with the normalized elements in the last dimension, sharing the storage.
    fn rows(&self, heads: &Tensor) -> Result<Tensor, LayerError> {
        match self.over {
            QkNorm::Head | QkNorm::HeadWithoutWeight => Ok(heads.clone()),
            QkNorm::AllHeads => Ok(heads.flatten_from(2)?),
        }
    }
}

impl HeadProjection {
    /// Keeps the elements of one rank of tp, of those of every rank, of a norm over all heads. That of each head stays.
    pub(super) fn divide_norm(
        &mut self,
        parameters: &mut ParameterList,
        ranks: &[Range<usize>],
        rank: usize,
    ) -> Result<(), LayerError> {
        match &mut self.norm {
            Some(HeadNorm { norm, over: QkNorm::AllHeads }) => norm.divide(parameters, ranks, rank),
            _ => Ok(()),
        }
    }
}

/// State for the backward pass of a norm over heads.
pub(in crate::nn) struct SavedHeadNorm {
    /// The heads before the norm.
    heads: Tensor,
    rstd: Tensor,
}

impl SavedHeadNorm {
    pub(super) fn bytes(&self) -> usize {
        ulysses_kernels::tensor::bytes(&self.heads) + ulysses_kernels::tensor::bytes(&self.rstd)
    }

    /// Its tensors, to be recycled.
    pub(super) fn into_tensors(self) -> [Tensor; 2] {
        [self.heads, self.rstd]
    }
}

impl HeadProjection {
    /// The rows of the linear layer for some heads.
    pub(super) fn rows(
        &self,
        heads: &Range<usize>,
        pass: &ForwardPass<'_>,
    ) -> Result<LinearRows, LayerError> {
        self.linear.rows(&self.range(heads), pass)
    }

    /// The gradients of [`rows`](Self::rows).
    pub(super) fn gradient_rows<'a>(
        &self,
        heads: &Range<usize>,
        pass: &BackwardPass<'a>,
    ) -> LinearGradients<'a> {
        self.linear.gradient_rows(&self.range(heads), pass)
    }

    fn range(&self, heads: &Range<usize>) -> Range<usize> {
        heads.start * self.outputs_per_head..heads.end * self.outputs_per_head
    }

    /// Allocates some heads of all tokens, `[batch, seq_local, heads, head_dim]`, with unspecified content.
    pub(super) fn alloc(&self, heads: &Range<usize>, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
        let dims = (pass.ctx.batch(), pass.ctx.seq_len_local(), heads.len(), self.head_dim);
        Ok(pass.workspace().alloc(dims)?)
    }

    /// Allocates the outputs of some heads, `[batch, seq_local, heads, outputs_per_head]`.
    pub(super) fn alloc_outputs(
        &self,
        heads: &Range<usize>,
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let dims = (pass.ctx.batch(), pass.ctx.seq_len_local(), heads.len(), self.outputs_per_head);
        Ok(pass.workspace().alloc(dims)?)
    }

    /// Normalizes the heads, if there is a norm.
    ///
    /// # Shapes
    /// `heads`, result: `[batch, seq_local, heads, head_dim]`.
    pub(super) fn normalize(
        &self,
        heads: Tensor,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<SavedHeadNorm>), LayerError> {
        let Some(norm) = &self.norm else { return Ok((heads, None)) };
        let rows = norm.rows(&heads)?;
        let rstd = pass.workspace().alloc_f32(&rows.dims()[..rows.rank() - 1])?;
        let normed = norm.norm.forward(&rows, &rstd, pass)?.reshape(heads.shape())?;
        Ok((normed, Some(SavedHeadNorm { heads, rstd })))
    }

    /// Backward of [`normalize`](Self::normalize): adds to the norm's gradient, unless it is frozen, and returns the
    /// input's gradient. Consumes `dy`.
    ///
    /// # Shapes
    /// `dy`, result: `[batch, seq_local, heads, head_dim]`.
    pub(super) fn backward_norm(
        &self,
        dy: Tensor,
        saved: Option<SavedHeadNorm>,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let (Some(norm), Some(saved)) = (&self.norm, saved) else { return Ok(dy) };
        let dheads = pass.forward.workspace().alloc(dy.dims())?;
        let [dy_rows, heads, dheads_rows] = [&dy, &saved.heads, &dheads].map(|tensor| norm.rows(tensor));
        norm.norm.backward(&dy_rows?, &heads?, &saved.rstd, &dheads_rows?, false, pass)?;
        pass.forward.recycle([dy]);
        pass.forward.recycle(saved.into_tensors());
        Ok(dheads)
    }
}
