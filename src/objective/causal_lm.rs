//! The final norm, the output projection and the loss, in tiles of labeled tokens.

mod shared_tiles;
mod vocab_parallel;

use super::labeled_tokens::Chunk;
use super::{LabeledTokens, Objective};
use crate::nn::{
    Init, LayerContext, LayerError, LocalBatch, NormConfig, ParameterSpec, Saved, TensorRank, add_bias,
    add_bias_gradient,
};
use candle_core::Tensor;
use std::num::NonZero;
use ulysses_kernels::device::dry;
use ulysses_kernels::lm_head_loss::{
    self, LogitTiles, Losses, Projection, ProjectionGradients, default_tile_tokens,
};
use ulysses_kernels::{Workspace, elementwise, linear, rms_norm};
use vocab_parallel::VocabParallelLm;

/// RMSNorm, linear head and cross-entropy of the next token, for the tokens that have a label.
///
/// Training never holds all logits, `[tokens, vocab]`. They exist for
/// [`Tiling::loss_tile_tokens`](crate::nn::Tiling::loss_tile_tokens) tokens at a time, in the forward and in the backward pass.
#[derive(Debug, Clone)]
pub struct CausalLm {
    /// The norm's weight, `[hidden]`, the projection, `[vocab, hidden]`, then if there are any the norm's bias and the projection's,
    /// `[vocab]`.
    parameters: Vec<ParameterSpec>,
    norm: NormConfig,
    /// Factor on the logits.
    logit_scale: f64,
    /// Then their soft cap.
    softcap: Option<f32>,
}

/// State saved for the backward pass.
pub(super) struct SavedHead {
    x: Tensor,
    /// Logsumexp, in the first rows of each chunk's region.
    lse: Tensor,
    tokens: LabeledTokens,
}

/// Tensors of a chunk's backward pass.
struct ChunkTensors<'a> {
    /// Hidden states of the region.
    x: Tensor,
    /// Their gradient.
    dx: Tensor,
    /// Statistics of the labeled tokens.
    lse: Tensor,
    rstd: Tensor,
    /// Rows for temporary values, as many as the shard has.
    buffer: &'a Tensor,
    /// How the logits are computed.
    tile: LogitTiles,
}

/// A value for each parameter.
struct Head<T> {
    norm: T,
    projection: T,
    norm_bias: Option<T>,
    bias: Option<T>,
}

impl<'a> Head<&'a Tensor> {
    fn projection(&self) -> Projection<'a> {
        Projection { weight: self.projection, bias: self.bias }
    }
}

impl<'a> Head<&'a Option<Tensor>> {
    /// The gradients of the projection, unless it is frozen.
    fn projection(&self) -> ProjectionGradients<'a> {
        let bias = self.bias.and_then(Option::as_ref);
        ProjectionGradients { weight: self.projection.as_ref(), bias }
    }
}

impl CausalLm {
    /// Creates a head over `vocab_size` classes whose matrix is called `projection_name`.
    pub fn new(
        projection_name: &str,
        vocab_size: usize,
        hidden_size: usize,
        norm: impl Into<NormConfig>,
        std: f64,
    ) -> Self {
        let norm_config = norm.into();
        let norm = ParameterSpec::new("model.norm.weight", [hidden_size], norm_config.init());
        let projection = ParameterSpec::new(projection_name, [vocab_size, hidden_size], Init::Normal { std });
        let bias = ParameterSpec::new("model.norm.bias", [hidden_size], Init::Zeros);
        let bias = Some(bias).filter(|_| norm_config.bias);
        let parameters = [norm, projection].into_iter().chain(bias).collect();
        Self { parameters, norm: norm_config, logit_scale: 1.0, softcap: None }
    }

    /// Gives the norm another name.
    #[must_use]
    pub fn with_norm_name(mut self, name: &str) -> Self {
        self.parameters[0].name = format!("{name}.weight");
        if self.norm.bias {
            self.parameters[2].name = format!("{name}.bias");
        }
        self
    }

    /// Gives the projection a bias of this name.
    #[must_use]
    pub fn with_bias(mut self, name: &str) -> Self {
        self.parameters.push(ParameterSpec::new(name, [self.vocab_size()], Init::Zeros));
        self
    }

    /// Multiplies the logits, before a bias is added.
    #[must_use]
    pub fn with_logit_scale(self, logit_scale: f64) -> Self {
        Self { logit_scale, ..self }
    }

    /// Limits the logits to `cap · tanh(logit / cap)`, after their factor.
    #[must_use]
    pub fn with_softcap(self, cap: Option<f64>) -> Self {
        Self { softcap: cap.map(|cap| cap as f32), ..self }
    }

    /// The input of the projection, or its gradient, instead of the logits.
    fn scale(&self, normed: &Tensor) -> Result<(), LayerError> {
        match self.logit_scale == 1.0 {
            true => Ok(()),
            false => Ok(elementwise::scale(normed, self.logit_scale as f32)?),
        }
    }

    /// Writes the input of the projection.
    fn normalize(
        &self,
        x: &Tensor,
        head: &Head<&Tensor>,
        [y, rstd]: [&Tensor; 2],
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        rms_norm::forward(x, self.norm.gain(head.norm), self.norm.eps, y, rstd)?;
        if let Some(bias) = head.norm_bias {
            add_bias(bias, y, true, ws)?;
        }
        self.scale(y)
    }

    /// Backward of [`normalize`](Self::normalize): writes the gradient of x for that of the projection's input, `dy`, which it
    /// overwrites.
    fn backward_norm(
        &self,
        dy: &Tensor,
        [x, rstd]: [&Tensor; 2],
        dx: &Tensor,
        head: &Head<&Tensor>,
        gradients: &Head<&Option<Tensor>>,
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        self.scale(dy)?;
        if let Some(Some(dbias)) = gradients.norm_bias {
            add_bias_gradient(dy, dbias, ws)?;
        }
        let dweight = gradients.norm.as_ref();
        Ok(rms_norm::backward(dy, x, self.norm.gain(head.norm), rstd, dx, false, dweight)?)
    }

    /// Writes all logits.
    fn project(
        &self,
        normed: &Tensor,
        head: &Head<&Tensor>,
        logits: &Tensor,
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        linear::forward(normed, head.projection, logits, false)?;
        head.bias.map_or(Ok(()), |bias| add_bias(bias, logits, true, ws))?;
        Ok(self.softcap.map_or(Ok(()), |cap| elementwise::softcap(logits, cap))?)
    }

    /// Number of classes.
    pub fn vocab_size(&self) -> usize {
        self.parameters[1].shape[0]
    }

    fn head<'a, T>(&self, values: &'a [T]) -> Result<Head<&'a T>, LayerError> {
        match values {
            [norm, projection, biases @ ..] if values.len() == self.parameters.len() => {
                let (of_norm, of_projection) = biases.split_at(usize::from(self.norm.bias));
                Ok(Head { norm, projection, norm_bias: of_norm.first(), bias: of_projection.first() })
            }
            _ => Err(LayerError::parameter_count(self.name(), self.parameters.len(), values.len())),
        }
    }

    /// Number of tokens whose logits may exist at a time.
    fn tile_tokens(&self, ctx: &LayerContext) -> Result<usize, LayerError> {
        match ctx.tiling().loss_tile_tokens.map(NonZero::get) {
            Some(tile) => Ok(tile),
            None => Ok(default_tile_tokens(self.vocab_size(), &ctx.workspace().options().device)?),
        }
    }

    /// The logits that exist at a time. Their number does not depend on the masks, so that all micro batches recycle the same
    /// memory.
    fn logit_tiles(&self, tokens: &LabeledTokens, ctx: &LayerContext) -> Result<LogitTiles, LayerError> {
        let tokens = self.tile_tokens(ctx)?.min(tokens.num_tokens()).max(1);
        Ok(LogitTiles { softcap: self.softcap, ..tokens.into() })
    }

    fn tokens(&self, batch: &LocalBatch<'_>) -> Result<LabeledTokens, LayerError> {
        match dry::is_dry() {
            true => Ok(LabeledTokens::dry(batch.num_tokens())),
            false => LabeledTokens::new(batch.labels, self.vocab_size()),
        }
    }

    /// The token losses of this rank, and the state for their backward pass.
    pub(super) fn losses(
        &self,
        params: &[Tensor],
        x: &Tensor,
        tokens: LabeledTokens,
        ctx: &LayerContext,
    ) -> Result<(Losses, SavedHead), LayerError> {
        let (ws, head) = (ctx.workspace(), self.head(params)?);
        let rows = tokens.rows_of(x)?;
        tokens.upload(x.device())?;
        let [rstd, lse] = [ws.alloc_f32(tokens.num_tokens())?, ws.alloc_f32(tokens.num_tokens())?];
        let normed = ws.alloc(rows.dims())?;
        let gathered = tokens.is_compacted().then(|| ws.alloc(rows.dims())).transpose()?;
        let tile = self.logit_tiles(&tokens, ctx)?;
        let mut losses = Losses::default();
        for chunk in &tokens.chunks {
            let labeled = chunk.labels.len();
            let x = match (&chunk.compaction, &gathered) {
                (Some(compaction), Some(buffer)) => compaction.compact(&chunk.region_of(&rows)?, buffer)?,
                _ => chunk.region_of(&rows)?,
            };
            let [normed, rstd] = [normed.narrow(0, 0, labeled)?, rstd.narrow(0, 0, labeled)?];
            self.normalize(&x, &head, [&normed, &rstd], ws)?;
            let lse = chunk.region_of(&lse)?.narrow(0, 0, labeled)?;
            let operands = lm_head_loss::Operands::new(&normed, head.projection(), &chunk.labels);
            losses.append(lm_head_loss::forward(&operands, tile, &lse, ws)?);
        }
        [Some(rstd), Some(normed), gathered].into_iter().flatten().for_each(|tensor| ws.recycle(tensor));
        Ok((losses, SavedHead { x: x.clone(), lse, tokens }))
    }

    /// Writes the gradient of a chunk's region.
    fn backward_chunk(
        &self,
        chunk: &Chunk,
        ChunkTensors { x: region, dx, lse, rstd, buffer, tile }: ChunkTensors<'_>,
        head: &Head<&Tensor>,
        scale: f32,
        gradients: &Head<&Option<Tensor>>,
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        let Chunk { labels, compaction, .. } = chunk;
        // The buffer has the gathered hidden states, if any are, and then the gradient of the normalized ones.
        let (x, dnormed_at) = match compaction {
            Some(compaction) => (compaction.compact(&region, buffer)?, labels.len()),
            None => (region, 0),
        };
        let dnormed = buffer.narrow(0, dnormed_at, labels.len())?;
        // First the normalized hidden states, then the gradient of `x`.
        let compact = dx.narrow(0, 0, labels.len())?;
        self.normalize(&x, head, [&compact, &rstd], ws)?;
        let operands = lm_head_loss::Operands::new(&compact, head.projection(), labels);
        let of_head = lm_head_loss::Gradients::new(&dnormed, gradients.projection());
        lm_head_loss::backward(&operands, &lse, scale, &of_head, tile, ws)?;
        self.backward_norm(&dnormed, [&x, &rstd], &compact, head, gradients, ws)?;
        compaction.as_ref().map_or(Ok(()), |compaction| compaction.expand(&dx, buffer))
    }
}

impl Objective for CausalLm {
    fn name(&self) -> &str {
        "head"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    /// Divides the vocabulary.
    fn tensor_parallel(&self, tp: TensorRank) -> Option<Box<dyn Objective>> {
        Some(Box::new(VocabParallelLm::new(self.clone(), tp)?))
    }

    /// Tokens without a label cost nothing.
    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<(Losses, Saved), LayerError> {
        let (losses, saved) = self.losses(params, x, self.tokens(batch)?, ctx)?;
        let bytes = [&saved.x, &saved.lse].into_iter().map(ulysses_kernels::tensor::bytes).sum();
        Ok((losses, Saved::new(saved, bytes)))
    }

    /// The gradient of `x` is 0 for tokens without a label.
    fn backward(
        &self,
        params: &[Tensor],
        saved: Saved,
        scale: f32,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let ws = ctx.workspace();
        let (params, grads) = (self.head(params)?, self.head(grads)?);
        let SavedHead { x, lse, tokens } = saved.downcast(self.name())?;
        let tile = self.logit_tiles(&tokens, ctx)?;
        let (rows, dx, buffer) = (tokens.rows_of(&x)?, ws.alloc(x.dims())?, ws.alloc(x.dims())?);
        let (dx_rows, buffer_rows) = (tokens.rows_of(&dx)?, tokens.rows_of(&buffer)?);
        let rstd = ws.alloc_f32(tokens.num_tokens())?;
        if tokens.chunks.is_empty() {
            elementwise::fill(&dx, 0.0)?;
        }
        for chunk in &tokens.chunks {
            let tensors = ChunkTensors {
                x: chunk.region_of(&rows)?,
                dx: chunk.region_of(&dx_rows)?,
                lse: chunk.region_of(&lse)?.narrow(0, 0, chunk.labels.len())?,
                rstd: rstd.narrow(0, 0, chunk.labels.len())?,
                buffer: &buffer_rows,
                tile,
            };
            self.backward_chunk(chunk, tensors, &params, scale, &grads, ws)?;
        }
        [rstd, lse, buffer].into_iter().for_each(|tensor| ws.recycle(tensor));
        Ok(dx)
    }

    fn evaluate(
        &self,
        params: &[Tensor],
        x: Tensor,
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<Losses, LayerError> {
        let (losses, SavedHead { lse, .. }) = self.losses(params, &x, self.tokens(batch)?, ctx)?;
        [x, lse].into_iter().for_each(|tensor| ctx.workspace().recycle(tensor));
        Ok(losses)
    }

    /// The logits.
    fn output(&self, params: &[Tensor], x: &Tensor, ctx: &LayerContext) -> Result<Tensor, LayerError> {
        let (ws, head) = (ctx.workspace(), self.head(params)?);
        let (batch, tokens, _) = x.dims3()?;
        let (normed, rstd) = (ws.alloc(x.dims())?, ws.alloc_f32((batch, tokens))?);
        self.normalize(x, &head, [&normed, &rstd], ws)?;
        let logits = Tensor::zeros((batch, tokens, self.vocab_size()), x.dtype(), x.device())?;
        self.project(&normed, &head, &logits, ws)?;
        [normed, rstd].into_iter().for_each(|tensor| ws.recycle(tensor));
        Ok(logits)
    }
}
