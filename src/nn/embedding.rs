//! The token embedding: from token ids to hidden states.

use super::{Init, LayerContext, LayerError, ParameterSpec};
use candle_core::Tensor;
use ulysses_kernels::embedding::{self, Ids};

/// The token embedding. With a tied head, both use its matrix.
#[derive(Debug, Clone)]
pub struct Embedding {
    hidden_size: usize,
    parameter: ParameterSpec,
}

impl Embedding {
    /// Creates `model.embed_tokens.weight`, `[vocab_size, hidden_size]`, with initial standard deviation
    /// `std`.
    pub fn new(vocab_size: usize, hidden_size: usize, std: f64) -> Self {
        let name = "model.embed_tokens.weight";
        let parameter = ParameterSpec::new(name, [vocab_size, hidden_size], Init::Normal { std });
        Self { hidden_size, parameter }
    }

    /// The embedding matrix.
    pub fn parameter(&self) -> &ParameterSpec {
        &self.parameter
    }

    /// Looks up this rank's tokens.
    ///
    /// # Shapes
    /// `input_ids`: `[batch, seq_local]` → `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A token id outside the vocabulary.
    pub fn forward(
        &self,
        weight: &Tensor,
        input_ids: &Ids,
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let y = ctx.workspace().alloc((ctx.batch(), ctx.seq_len_local(), self.hidden_size))?;
        embedding::forward(input_ids, weight, &y)?;
        Ok(y)
    }

    /// Adds to the matrix's gradient.
    ///
    /// # Shapes
    /// `dy`: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn backward(&self, input_ids: &Ids, dy: &Tensor, dweight: &Tensor) -> Result<(), LayerError> {
        Ok(embedding::backward(input_ids, dy, dweight)?)
    }
}
