//! Saved state of linear attention.

use super::gated_norm::OutputAndGate;
use super::mixed::Mixed;
use crate::nn::ForwardPass;
use candle_core::Tensor;
use ulysses_kernels::tensor;

/// State of a forward pass for its backward pass. Convolution, decay and rate are recomputed.
pub struct LinearAttentionSaved {
    /// State of this rank's heads, for all tokens.
    pub(super) heads: HeadsSaved,
    /// The output of all heads before the norm, and the projection for its gate, for this rank's tokens.
    pub(super) gating: OutputAndGate,
    /// Of projections of low rank.
    pub(super) latents: Vec<Tensor>,
}

/// State of one rank's heads.
pub(super) struct HeadsSaved {
    /// Queries, keys, values before the convolution, and the projections for rate and decay. If states are passed on, the first three
    /// are extended by the tokens before them.
    pub(super) mixed: Mixed<Tensor>,
    /// The states at some tokens; `None` without heads.
    pub(super) states: Option<Tensor>,
    pub(super) passed: PassedStates,
}

/// States of a rank that passes them on, kept for the backward pass, in f32.
#[derive(Default)]
pub(super) struct PassedStates {
    /// The state before each range of its tokens; `None` before the first of all.
    pub(super) before: Vec<Option<Tensor>>,
    /// T of each range; `None` of the first and the last of all.
    pub(super) matrices: Vec<Option<Tensor>>,
}

impl LinearAttentionSaved {
    /// Bytes of the tensors.
    pub fn bytes(&self) -> usize {
        let HeadsSaved { mixed, states, passed } = &self.heads;
        let PassedStates { before, matrices } = passed;
        mixed
            .iter()
            .chain(states)
            .chain(before.iter().chain(matrices).flatten())
            .chain([&self.gating.out, &self.gating.z])
            .chain(&self.latents)
            .map(tensor::bytes)
            .sum()
    }

    /// Recycles the tensors.
    pub fn recycle(self, pass: &ForwardPass<'_>) {
        self.heads.recycle(pass);
        self.gating.recycle(pass);
        pass.recycle(self.latents);
    }
}

impl HeadsSaved {
    pub(super) fn recycle(self, pass: &ForwardPass<'_>) {
        pass.recycle(Vec::from(self.mixed));
        let PassedStates { before, matrices } = self.passed;
        pass.recycle(self.states.into_iter().chain(before.into_iter().chain(matrices).flatten()));
    }
}
