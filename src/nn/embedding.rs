//! The token embedding: from token ids to hidden states.

use super::{Init, InputLayer, LayerContext, LayerError, LocalBatch, ParameterSpec, Saved};
use candle_core::Tensor;
use ulysses_kernels::device::dry;
use ulysses_kernels::embedding::{self, Ids};

/// The token embedding. With a tied head, both use its matrix.
#[derive(Debug, Clone)]
pub struct Embedding {
    hidden_size: usize,
    parameters: [ParameterSpec; 1],
}

impl Embedding {
    /// Creates `model.embed_tokens.weight`, `[vocab_size, hidden_size]`, with initial standard deviation
    /// `std`.
    pub fn new(vocab_size: usize, hidden_size: usize, std: f64) -> Self {
        let name = "model.embed_tokens.weight";
        let parameters = [ParameterSpec::new(name, [vocab_size, hidden_size], Init::Normal { std })];
        Self { hidden_size, parameters }
    }
}

impl InputLayer for Embedding {
    fn name(&self) -> &str {
        "embedding"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn forward(
        &self,
        params: &[Tensor],
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError> {
        let [weight] = params else { return Err(LayerError::parameter_count(self.name(), 1, params.len())) };
        let ids = match dry::is_dry() {
            true => Ids::dry(batch.num_tokens()),
            false => Ids::new(batch.input_ids),
        };
        let y = ctx.workspace().alloc((ctx.batch(), ctx.seq_len_local(), self.hidden_size))?;
        embedding::forward(&ids, weight, &y)?;
        Ok((y, Saved::new(ids, 0)))
    }

    fn backward(&self, saved: Saved, dx: &Tensor, grads: &[Option<Tensor>]) -> Result<(), LayerError> {
        let ids: Ids = saved.downcast(self.name())?;
        match grads {
            [Some(dweight)] => Ok(embedding::backward(&ids, dx, dweight)?),
            [None] => Ok(()),
            _ => Err(LayerError::parameter_count(self.name(), 1, grads.len())),
        }
    }
}
