//! Linear attention with a decaying state, forward and backward in chunks: by the gated delta rule (Yang et al. 2024,
//! arXiv 2412.06464), that with a decay per channel of the keys (Kimi Linear, arXiv 2510.26692), or by sums as in Mamba 2 (Dao and
//! Gu 2024, arXiv 2405.21060).
//!
//! Each value head of each document has a state, a matrix `[Dk, Dv]` that is zero at first. By [`Rule::Delta`], with the
//! normalized key k, the normalized query q times 1/√Dk, value v, decay eᵍ and rate β of a token:
//!
//! ```text
//! state ← eᵍ · state                            decay
//! state ← state + k · (β · (v − stateᵀ·k))ᵀ     the delta rule: what the state recalls for k moves towards v
//! o = stateᵀ·q
//! ```
//!
//! Queries and keys are normalized inside: x / √(Σx² + 1e-6), as in transformers (`use_qk_l2norm_in_kernel`).
//!
//! By [`Rule::ChannelDelta`], each row of the state decays by itself: `state ← diag(eᵍ) · state` with a g per key channel.
//!
//! By [`Rule::Sum`], with queries and keys as they are and the factor D of the head's skip connection:
//!
//! ```text
//! state ← eᵍ · state + k · (β · v)ᵀ
//! o = stateᵀ·q + D · v
//! ```
//!
//! In the words of Mamba 2, q is C, k is B, v is x, and β is the time step.
//!
//! # Shapes
//! `q, k [B, S, Hk, Dk]`, `v, o [B, S, Hv, Dv]` of one element type; `g, beta [B, S, Hv]` in f32, but `g [B, S, Hk, Dk]` with
//! decays per channel. A gradient has the shape and the element type of its tensor.

mod backward;
mod cpu;
mod cuda;
mod forward;
mod layout;
pub mod reference;
mod rule;
mod segments;
#[cfg(test)]
mod tests;

pub use backward::backward;
pub use forward::forward;
pub use layout::LinearAttentionLayout;
pub use rule::Rule;

use super::OpError;
use super::Workspace;
use super::arg_check::{ArgCheck, Argument};
use crate::device::dry::{self, DryCpu, MatmulOp};
use candle_core::Tensor;
use std::ops::Deref;

/// Added to the squared norm of a query or key: that of transformers.
const NORM_EPS: f64 = 1e-6;

/// Inputs of both directions.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// Queries `[B, S, Hk, Dk]`, before any normalization.
    pub q: &'a Tensor,
    /// Keys `[B, S, Hk, Dk]`, before any normalization.
    pub k: &'a Tensor,
    /// Values `[B, S, Hv, Dv]`.
    pub v: &'a Tensor,
    /// Logarithms of the decays, at most 0, `[B, S, Hv]` in f32; `[B, S, Hk, Dk]` by [`Rule::ChannelDelta`].
    pub g: &'a Tensor,
    /// Rates of the updates, `[B, S, Hv]` in f32.
    pub beta: &'a Tensor,
    /// How a token changes the state. The factors of the skip connection: `[Hv]` in the type of the elements.
    pub rule: Rule<&'a Tensor>,
    /// The documents, and the key head of each value head.
    pub layout: &'a LinearAttentionLayout,
}

/// Outputs of the backward pass, which are overwritten.
#[derive(Debug, Clone, Copy)]
pub struct Gradients<'a> {
    /// Gradient of the queries, summed over the value heads that share a key head.
    pub dq: &'a Tensor,
    /// Gradient of the keys, summed likewise.
    pub dk: &'a Tensor,
    /// Gradient of the values.
    pub dv: &'a Tensor,
    /// Gradient of the logarithms of the decays.
    pub dg: &'a Tensor,
    /// Gradient of the rates.
    pub dbeta: &'a Tensor,
    /// Gradient of the skip connection, `[B, S, Hv]` in f32: the term of each token. Of [`Rule::Sum`] only.
    pub dskip: Option<&'a Tensor>,
}

/// Reports the FLOPs of a dry run. A backward pass counts twice the forward pass; what it computes again does not count.
fn report_flops(layout: &LinearAttentionLayout, sizes: &Sizes, is_backward: bool) {
    if dry::is_dry() {
        let passes = if is_backward { 2.0 } else { 1.0 };
        let flops = passes * layout.flops([sizes.key_dim, sizes.value_dim], sizes.rule);
        dry::report_flops(MatmulOp::Attention, is_backward, flops);
    }
}

impl<'a> Operands<'a> {
    fn elements(&self) -> Vec<Argument<'a>> {
        [("q", self.q), ("k", self.k), ("v", self.v)].into_iter().chain(self.skip()).collect()
    }

    fn skip(&self) -> Option<Argument<'a>> {
        self.rule.skip().map(|skip| ("skip", skip))
    }

    fn sums(&self, states: Option<Argument<'a>>) -> Vec<Argument<'a>> {
        [("g", self.g), ("beta", self.beta)].into_iter().chain(states).collect()
    }

    fn named(&self) -> Vec<Argument<'a>> {
        [self.elements(), self.sums(None)].concat()
    }

    /// The skip connection of each value head, if there is one.
    fn read_skip(&self, call: ArgCheck) -> Result<Option<impl Deref<Target = [f32]> + use<'a>>, OpError> {
        self.rule.skip().map(|skip| call.read(skip)).transpose()
    }
}

/// The sizes of a call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    seq_len: usize,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    rule: Rule,
}

impl Sizes {
    /// Checks the operands against each other and the layout.
    fn check(call: ArgCheck, operands: &Operands<'_>) -> Result<Self, OpError> {
        let Operands { q, k, v, g, beta, rule, layout } = *operands;
        let heads = |argument: Argument<'_>| match argument.1.dims() {
            &[_, _, heads, dim] if dim > 0 => Ok((heads, dim)),
            dims => {
                let expected = "[B, S, heads, dim], where dim is not 0";
                Err(OpError::Dimensions { op: call.op, argument: argument.0, expected, got: dims.to_vec() })
            }
        };
        let ((key_heads, key_dim), (_, value_dim)) = (heads(("k", k))?, heads(("v", v))?);
        let (documents, value_heads) = (layout.documents(), layout.v_to_k().len());
        let (batch, seq_len) = (documents.batch(), documents.seq_len());
        let rule = rule.without_skip();
        let sizes = Self { batch, seq_len, key_heads, value_heads, key_dim, value_dim, rule };
        let shapes: [(Argument<'_>, &[usize]); 5] = [
            (("q", q), &sizes.key_shape()),
            (("k", k), &sizes.key_shape()),
            (("v", v), &sizes.value_shape()),
            (("g", g), &sizes.decay_shape()),
            (("beta", beta), &sizes.gate_shape()),
        ];
        shapes.into_iter().try_for_each(|(argument, shape)| call.expect(argument, shape))?;
        operands.skip().map_or(Ok(()), |skip| call.expect(skip, &[value_heads]))?;
        for &key_head in layout.v_to_k().iter() {
            let exists = key_head < key_heads;
            call.expect_value("v_to_k", key_head as f64, exists, "the index of a head of `k`")?;
        }
        Ok(sizes)
    }

    fn check_states(
        &self,
        call: ArgCheck,
        operands: &Operands<'_>,
        states: Option<Argument<'_>>,
    ) -> Result<(), OpError> {
        let shape = operands.layout.states_shape(self.key_dim, self.value_dim);
        states.map_or(Ok(()), |states| call.expect(states, &shape))
    }

    /// A number of elements that only the delta rule has.
    fn of_delta(&self, elems: usize) -> usize {
        if self.rule.is_delta() { elems } else { 0 }
    }

    /// A number of elements that only decays per channel need.
    fn of_channels(&self, elems: usize) -> usize {
        if self.rule.has_channel_decays() { elems } else { 0 }
    }

    /// Calls `work` with the working memory of a call, from the workspace.
    fn with_scratch(
        &self,
        call: ArgCheck,
        layout: &LinearAttentionLayout,
        workspace: &Workspace,
        is_backward: bool,
        work: impl FnOnce(&mut [f32]) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        let elems = cpu::scratch_elems(self, layout, rayon::current_num_threads(), is_backward);
        let scratch = workspace.alloc_f32(elems)?;
        call.write(&scratch, work)?;
        workspace.recycle(scratch);
        Ok(())
    }

    /// The working memory of a call on a GPU.
    fn cuda_scratch(&self, workspace: &Workspace, is_backward: bool) -> Result<Tensor, OpError> {
        // CUDA cannot allocate zero bytes.
        workspace.alloc_f32(cuda::scratch_elems(self, is_backward).max(1))
    }

    /// Counts the working memory of a call in a dry run.
    fn alloc_scratch(
        &self,
        cpu: DryCpu,
        layout: &LinearAttentionLayout,
        workspace: &Workspace,
        is_backward: bool,
    ) -> Result<(), OpError> {
        workspace.recycle(workspace.alloc_f32(cpu::scratch_elems(self, layout, cpu.threads, is_backward))?);
        cpu::alloc_thread_scratch(cpu, self, is_backward);
        Ok(())
    }

    fn key_shape(&self) -> [usize; 4] {
        [self.batch, self.seq_len, self.key_heads, self.key_dim]
    }

    fn value_shape(&self) -> [usize; 4] {
        [self.batch, self.seq_len, self.value_heads, self.value_dim]
    }

    fn decay_shape(&self) -> Vec<usize> {
        if self.rule.has_channel_decays() { self.key_shape().to_vec() } else { self.gate_shape().to_vec() }
    }

    /// Heads that have decays, and the number that each has.
    fn decay_heads(&self) -> [usize; 2] {
        if self.rule.has_channel_decays() { [self.key_heads, self.key_dim] } else { [self.value_heads, 1] }
    }

    fn gate_shape(&self) -> [usize; 3] {
        [self.batch, self.seq_len, self.value_heads]
    }
}
