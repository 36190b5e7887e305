//! The final norm, the output projection and the loss, in tiles of tokens.

use super::{Init, LayerContext, ModelError, ParameterSpec};
use candle_core::Tensor;
use ulysses_kernels::lm_head_loss::{self, Labels, Losses};
use ulysses_kernels::{linear, rms_norm};

/// RMSNorm, linear head and cross-entropy.
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
    rstd: Tensor,
    lse: Tensor,
}

impl HeadSaved {
    /// Bytes of the saved tensors.
    pub fn bytes(&self) -> usize {
        [&self.x, &self.rstd, &self.lse].into_iter().map(ulysses_kernels::tensor::bytes).sum()
    }

    /// Recycles its tensors, including the head's input, if no backward pass will run.
    pub fn recycle(self, ctx: &LayerContext) {
        [self.x, self.rstd, self.lse].into_iter().for_each(|tensor| ctx.workspace().recycle(tensor));
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

    fn normalize(
        &self,
        x: &Tensor,
        norm: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Tensor), ModelError> {
        let y = ctx.workspace().alloc(x.dims())?;
        let rstd = ctx.workspace().alloc_f32((ctx.batch(), ctx.seq_len_local()))?;
        rms_norm::forward(x, norm, self.rms_norm_eps, &y, &rstd)?;
        Ok((y, rstd))
    }

    /// Computes the token losses of this rank; labels of −100 are ignored.
    ///
    /// # Shapes
    /// `x`: `[batch, seq_local, hidden]`, `labels`: `[batch, seq_local]`.
    ///
    /// # Errors
    /// A label outside the vocabulary.
    pub fn forward(
        &self,
        norm: &Tensor,
        projection: &Tensor,
        x: &Tensor,
        labels: &Labels,
        ctx: &LayerContext,
    ) -> Result<(Losses, HeadSaved), ModelError> {
        let (normed, rstd) = self.normalize(x, norm, ctx)?;
        let lse = ctx.workspace().alloc_f32((ctx.batch(), ctx.seq_len_local()))?;
        let loss =
            lm_head_loss::forward(&normed, projection, labels, self.tile_tokens, &lse, ctx.workspace())?;
        ctx.workspace().recycle(normed);
        Ok((loss, HeadSaved { x: x.clone(), rstd, lse }))
    }

    /// Backward of `scale · Σ loss`: adds to `dnorm` and `dprojection`, unless they are frozen, and returns
    /// the gradient of `x`.
    ///
    /// # Shapes
    /// Result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    #[allow(clippy::too_many_arguments, reason = "two parameters and their gradients")]
    pub fn backward(
        &self,
        (norm, projection): (&Tensor, &Tensor),
        saved: HeadSaved,
        labels: &Labels,
        scale: f32,
        (dnorm, dprojection): (Option<&Tensor>, Option<&Tensor>),
        ctx: &LayerContext,
    ) -> Result<Tensor, ModelError> {
        let HeadSaved { x, rstd, lse } = saved;
        let ws = ctx.workspace();
        let (normed, rstd_again) = self.normalize(&x, norm, ctx)?;
        let dnormed = ws.alloc(x.dims())?;
        let tile = self.tile_tokens;
        lm_head_loss::backward(&normed, projection, labels, &lse, scale, &dnormed, dprojection, tile, ws)?;
        let dx = normed;
        rms_norm::backward(&dnormed, &x, norm, &rstd, &dx, false, dnorm)?;
        [rstd, rstd_again, lse, dnormed].into_iter().for_each(|tensor| ws.recycle(tensor));
        Ok(dx)
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
    ) -> Result<Tensor, ModelError> {
        let (normed, rstd) = self.normalize(x, norm, ctx)?;
        let dims = (ctx.batch(), ctx.seq_len_local(), self.projection.shape[0]);
        let logits = Tensor::zeros(dims, x.dtype(), x.device())?;
        linear::forward(&normed, projection, &logits, false)?;
        [normed, rstd].into_iter().for_each(|tensor| ctx.workspace().recycle(tensor));
        Ok(logits)
    }
}
