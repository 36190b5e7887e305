//! The [`Layer`] trait.
//!
//! The state between forward and backward pass, from the outside in:
//!
//! | type | holds |
//! |---|---|
//! | `LayerTape` (engine) | what the engine keeps of a layer: its input and [`Saved`], or a checkpoint, which may be offloaded |
//! | [`Saved`] | the state of any layer, opaque to the engine |
//! | `SavedBlock` (families) | that state of a family's block: its input, the `MixerSaved` of its token mixer, `BlockOutputs` |
//! | `BlockOutputs` (families) | the outputs of a block's modules that its backward pass needs, and the state of its MLP |
//! | `MixerKept` | what a token mixer's forward pass fills: `MixerSaved`, or only tensors for a checkpoint |
//! | `MixerSaved` | the state of a token mixer of any kind: of one head chunk of attention, or of all heads |
//! | `AttentionSaved` | that of a head chunk of self-attention: all, or output and lse only, as `Saves` says |
//! | `SavedAttention` (kernels) | that of attention between exchanged q, k and v: these, the output and lse |

use super::{AttentionMask, LayerContext, LayerError, ParallelStyle, ParameterSpec, TensorRank};
use candle_core::Tensor;
use std::any::Any;

/// The size of a layer's attention, for its FLOPs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionExtent {
    /// Query elements per token: `num_heads · head_dim`; half the sum of those of queries and values, if these differ.
    pub width: usize,
    /// The attention mask.
    pub mask: AttentionMask,
}

/// State that a layer saves in its forward pass for its backward pass.
pub struct Saved {
    bytes: usize,
    state: Box<dyn Any + Send>,
}

impl Saved {
    /// Wraps a layer's own state, whose tensors occupy `bytes`.
    pub fn new<T: Any + Send>(state: T, bytes: usize) -> Self {
        Self { bytes, state: Box::new(state) }
    }

    /// Bytes of the saved tensors.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the state to the `layer` that created it.
    ///
    /// # Errors
    /// State of another kind of layer.
    pub fn downcast<T: Any + Send>(self, layer: &str) -> Result<T, LayerError> {
        self.state.downcast::<T>().map(|state| *state).map_err(|_| LayerError::foreign_state(layer))
    }
}

/// One block of a model, from hidden states to hidden states.
///
/// The engine owns the parameters. It passes `params` (and in the backward pass `grads`), one tensor per
/// entry of [`parameters`](Self::parameters), in that order. It may reuse the storage in between, so a layer
/// stores no parameter tensor. A frozen parameter has no gradient, so a layer need not compute it.
///
/// With sequence parallelism, a layer gets only this rank's tokens. Anything that mixes tokens goes through a service of the
/// [`LayerContext`]: attention, the exchange of tokens for heads, or states that ranks pass on. Everything else must treat
/// tokens independently.
pub trait Layer: Send + Sync {
    /// Name for messages and reports, such as `model.layers.0`.
    fn name(&self) -> &str;

    /// The parameters, in the order of `params` and `grads`.
    fn parameters(&self) -> &[ParameterSpec];

    /// The size of the layer's attention; `None` without attention. Flexible sequence parallelism balances documents by it.
    fn attention_extent(&self) -> Option<AttentionExtent> {
        None
    }

    /// Computes the layer. `x` and the result stay unchanged until after this layer's backward, so the saved
    /// state may hold them.
    ///
    /// # Shapes
    /// `x`: `[batch, seq_local, hidden]`, result: `[batch, seq_local, output width]`, by default `hidden`.
    ///
    /// # Errors
    /// A refused operation or failed communication.
    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError>;

    /// **Adds** the parameters' gradients to `grads` and returns the gradient of `x`. The layer may overwrite
    /// `dy`, or return it as the result.
    ///
    /// # Shapes
    /// `dy`: as the result of [`forward`](Self::forward), result: as its `x`; `grads`: as `params`, `None` for frozen parameters.
    ///
    /// # Errors
    /// A refused operation or failed communication.
    fn backward(
        &self,
        params: &[Tensor],
        saved: Saved,
        dy: Tensor,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError>;

    /// Whether the backward pass may leave gradients of weights to a later pass, which adds to `grads` of the whole layer:
    /// [`DeferredGradients`](super::DeferredGradients). Not a layer that uses its `grads` itself, or calls another layer with
    /// some of them.
    fn defers_gradients(&self) -> bool {
        false
    }

    /// Takes over a plan of tensor parallelism, which knows styles by the full names of weights, before
    /// [`tensor_parallel`](Self::tensor_parallel). A layer that divides itself ignores it, and the engine refuses a plan that
    /// differs.
    fn apply_plan(&mut self, style_of: &dyn Fn(&str) -> Option<ParallelStyle>) {
        let _ = style_of;
    }

    /// The part of the layer that one rank of tp has. Between modules it has some of the tokens only, and its input and
    /// output are `[batch, some tokens, hidden]`: [`TokenExchange`](super::TokenExchange). A layer that treats every token by
    /// itself may return itself; its context is then [`LayerContext::of_own_tokens`].
    ///
    /// # Errors
    /// A layer that cannot be divided, by default.
    fn tensor_parallel(self: Box<Self>, tp: TensorRank) -> Result<Box<dyn Layer>, LayerError> {
        let _ = tp;
        Err(LayerError::NoTensorParallelism { layer: self.name().to_owned() })
    }

    /// As [`forward`](Self::forward), but saves only a checkpoint from which the layer is recomputed: `x`,
    /// then tensors that should be computed only once, such as the attention output
    /// ([`LayerContext::saves_attention_output`]). They are f32 or have the dtype of `x`. The engine may
    /// offload these tensors until the backward pass.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn forward_checkpointed(
        &self,
        params: &[Tensor],
        x: Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Vec<Tensor>), LayerError> {
        let (y, _) = self.forward(params, &x, ctx)?;
        Ok((y, vec![x]))
    }

    /// As [`backward`](Self::backward), from a checkpoint. The layer may recycle its tensors except the
    /// first: `x` is the output of the previous layer, which may still need it.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    fn backward_checkpointed(
        &self,
        params: &[Tensor],
        checkpoint: Vec<Tensor>,
        dy: Tensor,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let x = checkpoint.into_iter().next().ok_or_else(|| LayerError::foreign_state(self.name()))?;
        let (y, saved) = self.forward(params, &x, ctx)?;
        let dx = self.backward(params, saved, dy, grads, ctx)?;
        ctx.workspace().recycle(y);
        Ok(dx)
    }
}
