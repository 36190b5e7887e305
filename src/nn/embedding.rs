//! The token embedding: from token ids to hidden states.

use super::{Init, InputLayer, LayerContext, LayerError, LocalBatch, ParameterSpec, Saved};
use candle_core::{DType, Device, Tensor};
use ulysses_kernels::device::dry;
use ulysses_kernels::elementwise;
use ulysses_kernels::embedding::{self, Ids};

/// The token embedding. With a tied head, both use its matrix.
#[derive(Debug, Clone)]
pub struct Embedding {
    hidden_size: usize,
    multiplier: f64,
    parameters: [ParameterSpec; 1],
}

impl Embedding {
    /// Creates `model.embed_tokens.weight`, `[vocab_size, hidden_size]`, with initial standard deviation
    /// `std`.
    pub fn new(vocab_size: usize, hidden_size: usize, std: f64) -> Self {
        let name = "model.embed_tokens.weight";
        let parameters = [ParameterSpec::new(name, [vocab_size, hidden_size], Init::Normal { std })];
        Self { hidden_size, multiplier: 1.0, parameters }
    }

    /// Multiplies the rows of the matrix, by a factor that is rounded to the element type of the hidden states.
    #[must_use]
    pub fn with_multiplier(self, multiplier: f64) -> Self {
        Self { multiplier, ..self }
    }

    /// Multiplies hidden states or their gradient.
    fn multiply(&self, x: &Tensor) -> Result<(), LayerError> {
        if self.multiplier == 1.0 {
            return Ok(());
        }
        let rounded = Tensor::new(self.multiplier as f32, &Device::Cpu)?.to_dtype(x.dtype())?;
        Ok(elementwise::scale(x, rounded.to_dtype(DType::F32)?.to_scalar()?)?)
    }
}

impl InputLayer for Embedding {
    fn name(&self) -> &str {
        "embedding"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn hidden_size(&self) -> Option<usize> {
        Some(self.hidden_size)
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
        let y = ctx.workspace().alloc((batch.batch_size, batch.seq_len_local, self.hidden_size))?;
        embedding::forward(&ids, weight, &y)?;
        self.multiply(&y)?;
        Ok((y, Saved::new(ids, 0)))
    }

    fn backward(&self, saved: Saved, dx: &Tensor, grads: &[Option<Tensor>]) -> Result<(), LayerError> {
        let ids: Ids = saved.downcast(self.name())?;
        match grads {
            [Some(dweight)] => {
                self.multiply(dx)?;
                Ok(embedding::backward(&ids, dx, dweight)?)
            }
            [None] => Ok(()),
            _ => Err(LayerError::parameter_count(self.name(), 1, grads.len())),
        }
    }
}
