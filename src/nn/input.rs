//! The first part of a model: from a micro batch to hidden states.

use super::{LayerContext, LayerError, LocalBatch, ParameterSpec, Saved, TensorRank};
use candle_core::Tensor;

/// The first part of a model. [`Embedding`](super::Embedding) looks up token ids, [`Features`] passes values on.
pub trait InputLayer: Send + Sync {
    /// Name for messages, reports and checkpoints.
    fn name(&self) -> &str;

    /// The parameters, in the order of `params` and `grads`.
    fn parameters(&self) -> &[ParameterSpec];

    /// Elements per token of its result, if it is known: the stages of a pipeline exchange hidden states of this size.
    fn hidden_size(&self) -> Option<usize> {
        None
    }

    /// The part of the input that one rank of tp has; `None` for one that stays whole, and computes each rank's tokens there.
    fn tensor_parallel(&self, tp: TensorRank) -> Option<Box<dyn InputLayer>> {
        let _ = tp;
        None
    }

    /// Computes the input of the first layer.
    ///
    /// # Shapes
    /// Result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A batch that does not fit, or a refused operation.
    fn forward(
        &self,
        params: &[Tensor],
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError>;

    /// **Adds** the parameters' gradients to `grads`, if there are any that are not frozen. May overwrite `dx`.
    ///
    /// # Shapes
    /// `dx`: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A refused operation or failed communication.
    fn backward(
        &self,
        saved: Saved,
        dx: &Tensor,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<(), LayerError>;

    /// Whether [`backward`](Self::backward) keeps `dx`, which is then not recycled.
    fn keeps_gradient(&self) -> bool {
        false
    }
}

/// Values of the batch as hidden states, for models without a vocabulary.
#[derive(Debug, Clone)]
pub struct Features {
    name: String,
}

impl Features {
    /// Reads the batch's values called `name`, `[batch, seq, width]`.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into() }
    }
}

impl InputLayer for Features {
    fn name(&self) -> &str {
        "features"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &[]
    }

    fn forward(
        &self,
        _: &[Tensor],
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError> {
        let options = ctx.workspace().options();
        let x = batch.tensor(&self.name, options.dtype, &options.device)?;
        Ok((x, Saved::new((), 0)))
    }

    fn backward(
        &self,
        _: Saved,
        _: &Tensor,
        _: &[Option<Tensor>],
        _: &LayerContext,
    ) -> Result<(), LayerError> {
        Ok(())
    }
}
