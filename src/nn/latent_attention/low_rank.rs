//! A projection through a normalized latent.

use crate::nn::{
    BackwardPass, ForwardPass, LayerError, Linear, Norm, NormConfig, ParameterList, WeightSpec, token_rows,
};
use candle_core::Tensor;

/// Epsilon of the norms of latents, whatever that of the model's other norms is: as in DeepSeek's code and transformers.
const EPS: f64 = 1e-6;

/// `up(norm(down(x)))`
#[derive(Debug)]
pub(super) struct LowRank {
    /// To the latent.
    pub(super) down: Linear,
    norm: Norm,
    /// From the normalized latent.
    pub(super) up: Linear,
}

impl LowRank {
    /// Adds `self_attn.{name}_a_layernorm` and `self_attn.{name}_b_proj`, `[out, rank]`.
    pub(super) fn new(
        parameters: &mut ParameterList,
        name: &str,
        down: Linear,
        shape: [usize; 2],
        weight: WeightSpec,
    ) -> Self {
        let norm_name = format!("self_attn.{name}_a_layernorm");
        let norm = Norm::new(parameters, &norm_name, shape[1], NormConfig::from(EPS));
        let up = Linear::new(parameters, &format!("self_attn.{name}_b_proj"), shape, weight);
        Self { down, norm, up }
    }

    /// Writes `y = up(norm(latent))`, tile by tile.
    ///
    /// # Shapes
    /// `latent`: `[batch, seq_local, rank]`, `y`: `[batch, seq_local, …]`.
    pub(super) fn forward(
        &self,
        latent: &Tensor,
        y: &Tensor,
        pass: &ForwardPass<'_>,
    ) -> Result<(), LayerError> {
        for tile in pass.ctx.token_tiles() {
            let (normed, rstd) = self.normalized(&token_rows(latent, &tile)?, pass)?;
            self.up.forward(&normed, &token_rows(y, &tile)?, false, pass)?;
            pass.recycle([normed, rstd]);
        }
        Ok(())
    }

    /// Backward of [`forward`](Self::forward): adds to the gradients of norm and `up`. Returns the gradient of the latent, and
    /// recycles the latent.
    pub(super) fn backward(
        &self,
        latent: Tensor,
        dy: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let forward = &pass.forward;
        let dlatent = forward.workspace().alloc(latent.dims())?;
        for tile in forward.ctx.token_tiles() {
            let [latent, dlatent, dy] = [&latent, &dlatent, dy].map(|tensor| token_rows(tensor, &tile));
            let (latent, dy) = (latent?, dy?);
            let (normed, rstd) = self.normalized(&latent, forward)?;
            let dnormed = forward.workspace().alloc(latent.dims())?;
            self.up.backward_weight(&dy, &normed, pass)?;
            self.up.backward_input(&dy, &dnormed, false, forward)?;
            self.norm.backward(&dnormed, &latent, &rstd, (&dlatent?, false), pass)?;
            forward.recycle([normed, rstd, dnormed]);
        }
        forward.recycle([latent]);
        Ok(dlatent)
    }

    /// A tile of the normalized latent, with the reciprocal root mean squares.
    fn normalized(&self, latent: &Tensor, pass: &ForwardPass<'_>) -> Result<(Tensor, Tensor), LayerError> {
        let rstd = pass.workspace().alloc_f32(latent.dims()[0])?;
        Ok((self.norm.forward(latent, &rstd, pass)?, rstd))
    }
}
