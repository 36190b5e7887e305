//! The [`Layer`] trait and what describes a layer's parameters.

use super::{LayerContext, ModelError};
use candle_core::Tensor;
use std::any::Any;

/// How a parameter starts when it is not loaded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
}

/// One parameter of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSpec {
    /// Full name in Hugging Face's convention, for example
    /// `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Its shape; a linear weight is `[out, in]`.
    pub shape: Vec<usize>,
    /// How it starts.
    pub init: Init,
}

impl ParameterSpec {
    /// A parameter called `name`.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> Self {
        Self { name: name.into(), shape: shape.into(), init }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// What a layer keeps from its forward for its backward pass.
pub struct Saved {
    bytes: usize,
    state: Box<dyn Any + Send>,
}

impl Saved {
    /// Wraps a layer's own state, whose tensors hold `bytes`.
    pub fn new<T: Any + Send>(state: T, bytes: usize) -> Self {
        Self { bytes, state: Box::new(state) }
    }

    /// Bytes that the state keeps alive.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The state, for the `layer` that made it.
    ///
    /// # Errors
    /// When another kind of layer made it.
    pub fn downcast<T: Any + Send>(self, layer: &str) -> Result<T, ModelError> {
        match self.state.downcast() {
            Ok(state) => Ok(*state),
            Err(_) => Err(ModelError::ForeignSavedState { layer: layer.to_owned() }),
        }
    }
}

/// One block of a model, from hidden states to hidden states.
///
/// The engine owns the parameters: it passes `params` (and in the backward pass `grads`),
/// one tensor per entry of [`parameters`](Self::parameters) and in that order, and it may
/// take the storage back in between. A layer therefore keeps no parameter tensor. A frozen
/// parameter has no gradient to add to: a layer leaves out what it would compute for it.
///
/// With sequence parallelism a layer sees this rank's tokens only. What mixes tokens goes
/// through [`LayerContext::attention`]; everything else must be independent per token.
pub trait Layer: Send + Sync {
    /// Name for messages and reports, for example `model.layers.0`.
    fn name(&self) -> &str;

    /// The parameters, in the order of `params` and `grads`.
    fn parameters(&self) -> &[ParameterSpec];

    /// Computes the layer. `x` and the result stay as they are until after this layer's backward, so
    /// they may go into the saved state.
    ///
    /// # Shapes
    /// `x`, result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A refused operation or failed communication.
    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), ModelError>;

    /// **Adds** the parameters' gradients to `grads`, where there are any, and returns that of
    /// `x`. `dy` is the layer's to overwrite; it may come back as the result.
    ///
    /// # Shapes
    /// `dy`, result: `[batch, seq_local, hidden]`; `grads`: as `params`, none of frozen ones.
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
    ) -> Result<Tensor, ModelError>;

    /// As [`forward`](Self::forward), where the layer keeps no state but a checkpoint, from which it
    /// can be computed again: `x` first, then what is to be computed only once. The engine may move
    /// its tensors elsewhere until the backward pass.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn forward_checkpointed(
        &self,
        params: &[Tensor],
        x: Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Vec<Tensor>), ModelError> {
        let (y, _) = self.forward(params, &x, ctx)?;
        Ok((y, vec![x]))
    }

    /// As [`backward`](Self::backward), from a checkpoint. Its tensors are the layer's to recycle,
    /// except the first: `x` is the output of the layer before, which may still need it.
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
    ) -> Result<Tensor, ModelError> {
        let foreign = || ModelError::ForeignSavedState { layer: self.name().to_owned() };
        let x = checkpoint.into_iter().next().ok_or_else(foreign)?;
        let (y, saved) = self.forward(params, &x, ctx)?;
        let dx = self.backward(params, saved, dy, grads, ctx)?;
        ctx.workspace().recycle(y);
        Ok(dx)
    }
}
