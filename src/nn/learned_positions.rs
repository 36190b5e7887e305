//! Learned position embeddings (GPT-2).

use super::{
    Embedding, Init, InputLayer, LayerContext, LayerError, LocalBatch, ParameterSpec, Saved, TensorRank,
};
use candle_core::Tensor;
use ulysses_kernels::device::dry;
use ulysses_kernels::elementwise;
use ulysses_kernels::embedding::{self, Ids};

/// The embedding of each token, plus that of its position within its document.
#[derive(Debug, Clone)]
pub struct LearnedPositions {
    tokens: Embedding,
    /// The parameters of the token embedding, then the positions, `[num_positions, hidden]`.
    parameters: Vec<ParameterSpec>,
}

/// State saved for the backward pass.
struct SavedPositions {
    tokens: Saved,
    positions: Ids,
}

impl LearnedPositions {
    /// Adds the parameter `name`, `[num_positions, hidden_size]`, with initial standard deviation `std`.
    pub fn new(tokens: Embedding, name: &str, num_positions: usize, std: f64) -> Self {
        let mut parameters = tokens.parameters().to_vec();
        let shape = [num_positions, parameters[0].shape[1]];
        parameters.push(ParameterSpec::new(name, shape, Init::Normal { std }));
        Self { tokens, parameters }
    }

    fn split<'a, T>(&self, values: &'a [T]) -> Result<(&'a T, &'a [T]), LayerError> {
        match values.split_last() {
            Some(parts) if values.len() == self.parameters.len() => Ok(parts),
            _ => Err(LayerError::parameter_count(self.name(), self.parameters.len(), values.len())),
        }
    }

    /// The positions of this rank's tokens.
    fn positions(&self, ctx: &LayerContext) -> Result<Ids, LayerError> {
        if dry::is_dry() {
            return Ok(Ids::dry(ctx.batch() * ctx.seq_len_local()));
        }
        let num_positions = self.parameters[self.parameters.len() - 1].shape[0];
        match ctx.position_ids().iter().max() {
            Some(last) if *last as usize >= num_positions => {
                Err(LayerError::TooLongDocument { len: *last as usize + 1, num_positions })
            }
            _ => Ok(Ids::new(ctx.position_ids())),
        }
    }
}

impl InputLayer for LearnedPositions {
    fn name(&self) -> &str {
        self.tokens.name()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn hidden_size(&self) -> Option<usize> {
        self.tokens.hidden_size()
    }

    /// Divides the matrix of the tokens. Every rank has all positions.
    fn tensor_parallel(&self, tp: TensorRank) -> Option<Box<dyn InputLayer>> {
        let mut part = self.clone();
        part.tokens = self.tokens.divided(tp)?;
        part.parameters[..1].clone_from_slice(part.tokens.parameters());
        Some(Box::new(part))
    }

    fn forward(
        &self,
        params: &[Tensor],
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError> {
        let (weight, of_tokens) = self.split(params)?;
        let positions = self.positions(ctx)?;
        let (y, tokens) = self.tokens.forward(of_tokens, batch, ctx)?;
        let embedded = ctx.workspace().alloc(y.dims())?;
        embedding::forward(&positions, weight, &embedded)?;
        elementwise::accumulate(&y, &embedded)?;
        ctx.workspace().recycle(embedded);
        Ok((y, Saved::new(SavedPositions { tokens, positions }, 0)))
    }

    fn backward(
        &self,
        saved: Saved,
        dx: &Tensor,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<(), LayerError> {
        let SavedPositions { tokens, positions } = saved.downcast(self.name())?;
        let (gradient, of_tokens) = self.split(grads)?;
        if let Some(gradient) = gradient {
            embedding::backward(&positions, dx, gradient)?;
        }
        // May overwrite the gradient.
        self.tokens.backward(tokens, dx, of_tokens, ctx)
    }
}
