//! The final norm, the output projection and the loss, in tiles of labeled tokens.

use super::labeled_tokens::Chunk;
use super::{Init, LabeledTokens, LayerContext, LayerError, ParameterSpec};
use candle_core::Tensor;
use ulysses_kernels::lm_head_loss::{self, Losses};
use ulysses_kernels::{Workspace, elementwise, linear, rms_norm};

/// RMSNorm, linear head and cross-entropy, of the tokens that have a label.
///
/// Training never holds all logits, `[tokens, vocab]`. They exist for `tile_tokens` tokens at a time, in the
/// forward and in the backward pass.
#[derive(Debug, Clone)]
pub struct LossHead {
    norm: ParameterSpec,
    projection: ParameterSpec,
    rms_norm_eps: f64,
    tile_tokens: usize,
}

/// State saved for the backward pass of head and loss.
#[derive(Debug)]
pub struct HeadSaved {
    x: Tensor,
    /// Logsumexp, in the first rows of each chunk's region.
    lse: Tensor,
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
    /// Number of tokens whose logits exist at a time.
    tile: usize,
}

impl HeadSaved {
    /// Bytes of the saved tensors.
    pub fn bytes(&self) -> usize {
        [&self.x, &self.lse].into_iter().map(ulysses_kernels::tensor::bytes).sum()
    }

    /// Recycles its tensors, including the head's input, if no backward pass will run.
    pub fn recycle(self, ctx: &LayerContext) {
        [self.x, self.lse].into_iter().for_each(|tensor| ctx.workspace().recycle(tensor));
    }
}

impl LossHead {
    /// Creates a head over `vocab_size` classes whose matrix is called `projection_name`.
    pub fn new(
        projection_name: &str,
        vocab_size: usize,
        hidden_size: usize,
        rms_norm_eps: f64,
        std: f64,
    ) -> Self {
        Self {
            norm: ParameterSpec::new("model.norm.weight", [hidden_size], Init::Ones),
            projection: ParameterSpec::new(projection_name, [vocab_size, hidden_size], Init::Normal { std }),
            rms_norm_eps,
            tile_tokens: 1024,
        }
    }

    /// Sets the number of tokens whose logits exist at a time.
    #[must_use]
    pub fn with_tile_tokens(mut self, tile_tokens: usize) -> Self {
        self.tile_tokens = tile_tokens.max(1);
        self
    }

    /// The norm's weight.
    pub fn norm(&self) -> &ParameterSpec {
        &self.norm
    }

    /// The projection, `[vocab, hidden]`.
    pub fn projection(&self) -> &ParameterSpec {
        &self.projection
    }

    /// Number of classes.
    pub fn vocab_size(&self) -> usize {
        self.projection.shape[0]
    }

    /// Number of tokens in a tile. It does not depend on the masks, so that all micro batches recycle the same
    /// memory.
    fn tile_of(&self, tokens: &LabeledTokens) -> usize {
        self.tile_tokens.min(tokens.num_tokens()).max(1)
    }

    /// Computes the token losses of this rank. Tokens without a label cost nothing.
    ///
    /// # Shapes
    /// `x`: `[batch, seq_local, hidden]`, `tokens`: `[batch, seq_local]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(
        &self,
        norm: &Tensor,
        projection: &Tensor,
        x: &Tensor,
        tokens: &LabeledTokens,
        ctx: &LayerContext,
    ) -> Result<(Losses, HeadSaved), LayerError> {
        let ws = ctx.workspace();
        let rows = tokens.rows_of(x)?;
        tokens.upload(x.device())?;
        let [rstd, lse] = [ws.alloc_f32(tokens.num_tokens())?, ws.alloc_f32(tokens.num_tokens())?];
        let normed = ws.alloc(rows.dims())?;
        let gathered = tokens.is_compacted().then(|| ws.alloc(rows.dims())).transpose()?;
        let tile = self.tile_of(tokens);
        let mut losses = Losses::default();
        for chunk in &tokens.chunks {
            let labeled = chunk.labels.len();
            let x = match (&chunk.compaction, &gathered) {
                (Some(compaction), Some(buffer)) => compaction.compact(&chunk.region_of(&rows)?, buffer)?,
                _ => chunk.region_of(&rows)?,
            };
            let [normed, rstd] = [normed.narrow(0, 0, labeled)?, rstd.narrow(0, 0, labeled)?];
            rms_norm::forward(&x, norm, self.rms_norm_eps, &normed, &rstd)?;
            let lse = chunk.region_of(&lse)?.narrow(0, 0, labeled)?;
            losses.append(lm_head_loss::forward(&normed, projection, &chunk.labels, tile, &lse, ws)?);
        }
        [Some(rstd), Some(normed), gathered].into_iter().flatten().for_each(|tensor| ws.recycle(tensor));
        Ok((losses, HeadSaved { x: x.clone(), lse }))
    }

    /// Backward of `scale · Σ loss`: adds to `dnorm` and `dprojection`, unless they are frozen, and returns
    /// the gradient of `x`, which is 0 for tokens without a label.
    ///
    /// # Shapes
    /// Result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    #[allow(clippy::too_many_arguments, reason = "two parameters and their gradients")]
    pub fn backward(
        &self,
        parameters: (&Tensor, &Tensor),
        saved: HeadSaved,
        tokens: &LabeledTokens,
        scale: f32,
        gradients: (Option<&Tensor>, Option<&Tensor>),
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let ws = ctx.workspace();
        let HeadSaved { x, lse } = saved;
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
                tile: self.tile_of(tokens),
            };
            self.backward_chunk(chunk, tensors, parameters, scale, gradients, ws)?;
        }
        [rstd, lse, buffer].into_iter().for_each(|tensor| ws.recycle(tensor));
        Ok(dx)
    }

    /// Writes the gradient of a chunk's region.
    fn backward_chunk(
        &self,
        chunk: &Chunk,
        ChunkTensors { x: region, dx, lse, rstd, buffer, tile }: ChunkTensors<'_>,
        (norm, projection): (&Tensor, &Tensor),
        scale: f32,
        (dnorm, dprojection): (Option<&Tensor>, Option<&Tensor>),
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
        rms_norm::forward(&x, norm, self.rms_norm_eps, &compact, &rstd)?;
        lm_head_loss::backward(&compact, projection, labels, &lse, scale, &dnormed, dprojection, tile, ws)?;
        rms_norm::backward(&dnormed, &x, norm, &rstd, &compact, false, dnorm)?;
        compaction.as_ref().map_or(Ok(()), |compaction| compaction.expand(&dx, buffer))
    }

    /// Computes the logits of all of this rank's tokens, for evaluation and checks.
    ///
    /// # Shapes
    /// `x`: `[batch, seq_local, hidden]` → `[batch, seq_local, vocab]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn logits(
        &self,
        norm: &Tensor,
        projection: &Tensor,
        x: &Tensor,
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let ws = ctx.workspace();
        let (normed, rstd) = (ws.alloc(x.dims())?, ws.alloc_f32((ctx.batch(), ctx.seq_len_local()))?);
        rms_norm::forward(x, norm, self.rms_norm_eps, &normed, &rstd)?;
        let dims = (ctx.batch(), ctx.seq_len_local(), self.vocab_size());
        let logits = Tensor::zeros(dims, x.dtype(), x.device())?;
        linear::forward(&normed, projection, &logits, false)?;
        [normed, rstd].into_iter().for_each(|tensor| ws.recycle(tensor));
        Ok(logits)
    }
}
