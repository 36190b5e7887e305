//! The token embedding: from token ids to hidden states.

use super::{
    Init, InputLayer, LayerContext, LayerError, LocalBatch, ParallelStyle, ParameterSpec, Saved, TensorRank,
};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use ulysses_kernels::device::dry;
use ulysses_kernels::elementwise;
use ulysses_kernels::embedding::{self, Ids};

/// The token embedding. With a tied head, both use its matrix.
#[derive(Debug, Clone)]
pub struct Embedding {
    vocab_size: usize,
    hidden_size: usize,
    multiplier: f64,
    parameters: [ParameterSpec; 1],
    /// The rows of the matrix that this rank has, if the ranks of tp divide it.
    rows: Option<Range<usize>>,
}

impl Embedding {
    /// Creates `model.embed_tokens.weight`, `[vocab_size, hidden_size]`, with initial standard deviation
    /// `std`.
    pub fn new(vocab_size: usize, hidden_size: usize, std: f64) -> Self {
        let name = "model.embed_tokens.weight";
        let parameters = [ParameterSpec::new(name, [vocab_size, hidden_size], Init::Normal { std })];
        Self { vocab_size, hidden_size, multiplier: 1.0, parameters, rows: None }
    }

    /// Gives the matrix another name.
    #[must_use]
    pub fn with_name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.parameters[0].name);
        self
    }

    /// Multiplies the rows of the matrix, by a factor that is rounded to the element type of the hidden states.
    #[must_use]
    pub fn with_multiplier(self, multiplier: f64) -> Self {
        Self { multiplier, ..self }
    }

    /// With the rows of the matrix that one rank of tp has; `None` if there are fewer than ranks.
    pub(super) fn divided(&self, tp: TensorRank) -> Option<Self> {
        let mut part = self.clone();
        part.rows = Some(part.parameters[0].divide_vocabulary(ParallelStyle::Rowwise, tp)?);
        Some(part)
    }

    /// The ids that this rank looks up: with some rows of the matrix, those of all ranks of tp.
    fn ids(&self, batch: &LocalBatch<'_>, ctx: &LayerContext) -> Result<Ids, LayerError> {
        match &self.rows {
            None if dry::is_dry() => Ok(Ids::dry(batch.num_tokens())),
            None => Ok(Ids::new(batch.input_ids)),
            Some(_) if dry::is_dry() => Ok(Ids::dry(batch.batch_size * ctx.seq_len_of_tp_ranks())),
            Some(rows) => Ok(Ids::in_slice(batch.all_input_ids, self.vocab_size, rows)?),
        }
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

    /// Divides the rows of the matrix. A rank looks up its rows for the tokens of all.
    fn tensor_parallel(&self, tp: TensorRank) -> Option<Box<dyn InputLayer>> {
        Some(Box::new(self.divided(tp)?))
    }

    fn forward(
        &self,
        params: &[Tensor],
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError> {
        let [weight] = params else { return Err(LayerError::parameter_count(self.name(), 1, params.len())) };
        let ids = self.ids(batch, ctx)?;
        let y = ctx.workspace().alloc((
            batch.batch_size,
            ids.len() / batch.batch_size.max(1),
            self.hidden_size,
        ))?;
        embedding::forward(&ids, weight, &y)?;
        let y = match &self.rows {
            None => y,
            Some(_) => {
                // Each token's row is that of one rank, the others add 0.
                let own = ctx.token_exchange(self.name())?.reduce_scatter(&y)?;
                ctx.workspace().recycle(y);
                own
            }
        };
        self.multiply(&y)?;
        Ok((y, Saved::new(ids, 0)))
    }

    fn backward(
        &self,
        saved: Saved,
        dx: &Tensor,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<(), LayerError> {
        let ids: Ids = saved.downcast(self.name())?;
        let dweight = match grads {
            [Some(dweight)] => dweight,
            [None] => return Ok(()),
            _ => return Err(LayerError::parameter_count(self.name(), 1, grads.len())),
        };
        self.multiply(dx)?;
        if self.rows.is_none() {
            return Ok(embedding::backward(&ids, dx, dweight)?);
        }
        let all = ctx.token_exchange(self.name())?.all_gather(dx, ctx.seq_len_of_tp_ranks())?;
        embedding::backward(&ids, &all, dweight)?;
        ctx.workspace().recycle(all);
        Ok(())
    }
}
