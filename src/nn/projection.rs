//! Projections of a module's input, directly or through a latent.

use super::{
    BackwardPass, BranchInput, ForwardPass, LayerError, Linear, Norm, ParameterList, WeightSpec,
    recycle_unless, token_dims, token_rows,
};
use candle_core::Tensor;

/// A projection of a module's input.
#[derive(Debug)]
pub(super) enum Projection {
    Direct(Linear),
    LowRank(Box<LowRank>),
}

/// `up(down(x))`, or `up(norm(down(x)))`
#[derive(Debug)]
pub(super) struct LowRank {
    /// To the latent.
    down: Linear,
    norm: Option<Norm>,
    /// From the latent.
    up: Linear,
}

/// Projects the inputs of a module: writes the output of each. Returns the latents before their norms, in the order of the projections.
///
/// # Shapes
/// Outputs: `[batch, seq_local, …]`, latents: `[batch, seq_local, rank]`.
///
/// # Errors
/// Shapes that do not fit.
pub(super) fn project(
    input: BranchInput<'_>,
    outputs: &[(&Projection, &Tensor)],
    pass: &ForwardPass<'_>,
) -> Result<Vec<Tensor>, LayerError> {
    let (batch, tokens) = token_dims(input.x);
    let low_ranks = || outputs.iter().filter_map(|(projection, y)| Some((projection.low_rank()?, y)));
    let latents = low_ranks()
        .map(|(low_rank, _)| Ok(pass.workspace().alloc((batch, tokens, low_rank.down.num_outputs()))?));
    let latents = latents.collect::<Result<Vec<_>, LayerError>>()?;
    let mut rest = latents.iter();
    let first = outputs.iter().map(|(projection, y)| match projection {
        Projection::Direct(linear) => (linear, *y),
        Projection::LowRank(low_rank) => (&low_rank.down, rest.next().unwrap_or_else(|| one_each())),
    });
    input.project(&first.collect::<Vec<_>>(), pass)?;
    for ((low_rank, y), latent) in low_ranks().zip(&latents) {
        low_rank.forward(latent, y, pass)?;
    }
    Ok(latents)
}

/// Backward of [`project`], from the gradients of the outputs: adds to those of the parameters, of the branch's norm and of
/// the residual stream `dx`, as [`BranchInput::backward_project`]. Recycles latents and gradients.
///
/// # Errors
/// As [`project`].
pub(super) fn backward_project(
    input: BranchInput<'_>,
    doutputs: Vec<(&Projection, Tensor)>,
    latents: Vec<Tensor>,
    dx: &Tensor,
    pass: &BackwardPass<'_>,
) -> Result<(), LayerError> {
    let (mut first, mut latents) = (Vec::new(), latents.into_iter());
    for (projection, dy) in doutputs {
        match projection {
            Projection::Direct(linear) => first.push((linear, dy)),
            Projection::LowRank(low_rank) => {
                let latent = latents.next().unwrap_or_else(|| one_each());
                first.push((&low_rank.down, low_rank.backward(latent, &dy, pass)?));
                pass.forward.recycle([dy]);
            }
        }
    }
    let borrowed: Vec<_> = first.iter().map(|(linear, dy)| (*linear, dy)).collect();
    input.backward_project(&borrowed, dx, pass)?;
    pass.forward.recycle(first.into_iter().map(|(_, dy)| dy));
    Ok(())
}

fn one_each() -> ! {
    unreachable!("each projection of low rank has a latent")
}

impl Projection {
    /// A projection of low rank: adds the weight of `up`, `[out, rank]`, under the name.
    pub(super) fn through_latent(
        parameters: &mut ParameterList,
        up: &str,
        down: Linear,
        norm: Option<Norm>,
        out: usize,
        weight: impl Into<WeightSpec>,
    ) -> Self {
        let up = Linear::new(parameters, up, [out, down.num_outputs()], weight);
        Self::LowRank(Box::new(LowRank { down, norm, up }))
    }

    /// The layer whose outputs are those of the projection.
    pub(super) fn last_mut(&mut self) -> &mut Linear {
        match self {
            Self::Direct(linear) => linear,
            Self::LowRank(low_rank) => &mut low_rank.up,
        }
    }

    fn low_rank(&self) -> Option<&LowRank> {
        match self {
            Self::Direct(_) => None,
            Self::LowRank(low_rank) => Some(low_rank),
        }
    }
}

impl LowRank {
    /// Writes `y` from the latent, tile by tile.
    fn forward(&self, latent: &Tensor, y: &Tensor, pass: &ForwardPass<'_>) -> Result<(), LayerError> {
        for tile in pass.ctx.token_tiles() {
            let latent = token_rows(latent, &tile)?;
            let (normed, rstd) = self.normalized(&latent, pass)?;
            self.up.forward(&normed, &token_rows(y, &tile)?, false, pass)?;
            recycle_unless(normed, &latent, pass);
            pass.recycle(rstd);
        }
        Ok(())
    }

    /// Backward of [`forward`](Self::forward): adds to the gradients of norm and `up`. Returns the gradient of the latent, and
    /// recycles the latent.
    fn backward(&self, latent: Tensor, dy: &Tensor, pass: &BackwardPass<'_>) -> Result<Tensor, LayerError> {
        let forward = &pass.forward;
        let dlatent = forward.workspace().alloc(latent.dims())?;
        for tile in forward.ctx.token_tiles() {
            let [latent, dlatent, dy] = [&latent, &dlatent, dy].map(|tensor| token_rows(tensor, &tile));
            let (latent, dlatent, dy) = (latent?, dlatent?, dy?);
            let (normed, rstd) = self.normalized(&latent, forward)?;
            self.up.backward_weight(&dy, &normed, pass)?;
            match (&self.norm, rstd) {
                (Some(norm), Some(rstd)) => {
                    let dnormed = forward.workspace().alloc(latent.dims())?;
                    self.up.backward_input(&dy, &dnormed, false, forward)?;
                    norm.backward(&dnormed, &latent, &rstd, &dlatent, false, pass)?;
                    forward.recycle([normed, rstd, dnormed]);
                }
                _ => self.up.backward_input(&dy, &dlatent, false, forward)?,
            }
        }
        forward.recycle([latent]);
        Ok(dlatent)
    }

    /// A tile of the normalized latent, with the reciprocal root mean squares; the latent itself without a norm.
    fn normalized(
        &self,
        latent: &Tensor,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<Tensor>), LayerError> {
        let Some(norm) = &self.norm else { return Ok((latent.clone(), None)) };
        let rstd = pass.workspace().alloc_f32(latent.dims()[0])?;
        Ok((norm.forward(latent, &rstd, pass)?, Some(rstd)))
    }
}
