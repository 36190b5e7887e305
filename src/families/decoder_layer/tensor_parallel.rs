//! The decoder block of one tensor-parallel rank.

use super::DecoderLayer;
use super::block::{Block, BlockOutputs, SavedBlock, foreign};
use crate::nn::{
    BackwardPass, Branch, ForwardPass, LayerError, MixerKept, MlpSaved, ParameterList, TensorRank,
    TokenMixer, recycle_unless,
};
use candle_core::Tensor;

/// A [`DecoderLayer`] with the heads and intermediate elements of one rank of tp.
///
/// Norms and residual stream have some tokens per rank. Around a module, tokens are gathered, and its outputs, which are
/// partial sums, summed and scattered: the same bytes as an all-reduce of whole activations (arXiv 2205.05198, section 4.2.2).
pub(super) struct TensorParallelDecoder(DecoderLayer);

impl TensorParallelDecoder {
    /// Keeps the part of one rank.
    ///
    /// # Errors
    /// A layer that cannot be divided over so many ranks.
    pub(super) fn new(mut layer: DecoderLayer, tp: TensorRank) -> Result<Self, LayerError> {
        layer.mixer.divide(&mut layer.parameters, tp)?;
        layer.mlp.divide(&mut layer.parameters, tp)?;
        layer.attention_branch = layer.attention_branch.around_module_alone();
        layer.mlp_branch = layer.mlp_branch.around_module_alone();
        Ok(Self(layer))
    }

    /// The output of a branch's module, summed, for this rank's tokens.
    fn run_module<T>(
        branch: &Branch,
        x: &Tensor,
        module: impl FnOnce(&Tensor) -> Result<(Tensor, T), LayerError>,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, T), LayerError> {
        let exchange = pass.ctx.token_exchange(pass.layer)?;
        let (input, normed, rstd) = gathered_input(branch, x, pass)?;
        recycle_unless(normed, x, pass);
        pass.recycle([rstd]);
        let (partial, saved) = module(&input)?;
        let output = exchange.reduce_scatter(&partial)?;
        pass.recycle([input, partial]);
        Ok((output, saved))
    }

    /// The MLP's output, with its state if `keep`.
    fn run_mlp(
        &self,
        mid: &Tensor,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<MlpSaved>), LayerError> {
        let run = |input: &Tensor| self.0.mlp.forward(&Branch::module_alone(), input, keep, pass);
        Self::run_module(&self.0.mlp_branch, mid, run, pass)
    }

    /// Backward of [`run_module`](Self::run_module): adds to `dx`. `module` turns the gradient of its output into that of its input.
    fn run_module_backward(
        branch: &Branch,
        x: &Tensor,
        (doutput, dx): (&Tensor, &Tensor),
        module: impl FnOnce(&Tensor, &Tensor) -> Result<(), LayerError>,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let forward = &pass.forward;
        let exchange = forward.ctx.token_exchange(forward.layer)?;
        let (input, normed, rstd) = gathered_input(branch, x, forward)?;
        let gradient = exchange.all_gather(doutput, forward.ctx.seq_len_local())?;
        module(&input, &gradient)?;
        let dnormed = exchange.reduce_scatter(&gradient)?;
        branch.backward_enter(&dnormed, x, &rstd, dx, pass)?;
        recycle_unless(normed, x, forward);
        forward.recycle([input, rstd, gradient, dnormed]);
        Ok(())
    }
}

/// The input of a branch's module for all tokens, and for this rank's, with their reciprocal root mean squares.
pub(super) fn gathered_input(
    branch: &Branch,
    x: &Tensor,
    pass: &ForwardPass<'_>,
) -> Result<(Tensor, Tensor, Tensor), LayerError> {
    let rstd = pass.workspace().alloc_f32(&x.dims()[..2])?;
    let normed = branch.enter(x, &rstd, pass)?;
    let input = pass.ctx.token_exchange(pass.layer)?.all_gather(&normed, pass.ctx.seq_len_local())?;
    Ok((input, normed, rstd))
}

impl Block for TensorParallelDecoder {
    fn parameter_list(&self) -> &ParameterList {
        &self.0.parameters
    }

    fn mixer(&self) -> &TokenMixer {
        &self.0.mixer
    }

    fn run(
        &self,
        x: &Tensor,
        kept: &mut MixerKept,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, BlockOutputs), LayerError> {
        let DecoderLayer { attention_branch, mixer, mlp_branch, .. } = &self.0;
        let attend = |input: &Tensor| Ok((mixer.forward(&Branch::module_alone(), input, kept, pass)?, ()));
        let attention_output = Self::run_module(attention_branch, x, attend, pass)?.0;
        let mid = attention_branch.join(x, &attention_output, pass)?;
        let (output, mlp_state) = self.run_mlp(&mid, kept.is_state(), pass)?;
        let y = mlp_branch.join(&mid, &output, pass)?;
        self.0.multiply(&y, pass)?;
        pass.recycle([mid]);
        let mut mlp = Some(output);
        if !mlp_branch.needs_output() {
            pass.recycle(mlp.take());
        }
        Ok((y, BlockOutputs { mixer: Some(attention_output), mlp_state, mlp }))
    }

    fn recompute(
        &self,
        x: Tensor,
        kept: &mut impl Iterator<Item = Tensor>,
        pass: &ForwardPass<'_>,
    ) -> Result<SavedBlock, LayerError> {
        let DecoderLayer { attention_branch, mixer, mlp_branch, .. } = &self.0;
        let (attention_output, states) = match mixer.checkpoint_has_output(pass.ctx) {
            true => (kept.next().ok_or_else(|| foreign(pass))?, Vec::new()),
            false => {
                let recompute = |input: &Tensor| mixer.recompute(&Branch::module_alone(), input, kept, pass);
                Self::run_module(attention_branch, &x, recompute, pass)?
            }
        };
        let mut mlp = None;
        if mlp_branch.needs_output() {
            let mid = attention_branch.join(&x, &attention_output, pass)?;
            mlp = Some(self.run_mlp(&mid, false, pass)?.0);
            pass.recycle([mid]);
        }
        let outputs = BlockOutputs { mixer: Some(attention_output), mlp_state: None, mlp };
        Ok(SavedBlock { x, mixer: states, outputs })
    }

    fn run_backward(
        &self,
        SavedBlock { x, mixer: chunks, outputs }: SavedBlock,
        dy: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let DecoderLayer { attention_branch, mixer, mlp_branch, mlp, .. } = &self.0;
        let (forward, alone) = (&pass.forward, Branch::module_alone());
        let BlockOutputs { mixer: attention_output, mlp_state, mlp: mlp_output } = outputs;
        let attention_output = attention_output.ok_or_else(|| foreign(forward))?;
        self.0.multiply(&dy, forward)?;
        let mid = attention_branch.join(&x, &attention_output, forward)?;
        let doutput = mlp_branch.backward_join(|| mlp_output.ok_or_else(|| foreign(forward)), &dy, pass)?;
        let run_mlp = |input: &Tensor, dy: &Tensor| mlp.backward(&alone, input, mlp_state, dy, pass);
        Self::run_module_backward(mlp_branch, &mid, (&doutput, &dy), run_mlp, pass)?;
        recycle_unless(doutput, &dy, forward);
        forward.recycle([mid]);
        let mut attention_output = Some(attention_output);
        let take = || attention_output.take().ok_or_else(|| foreign(forward));
        let doutput = attention_branch.backward_join(take, &dy, pass)?;
        forward.recycle(attention_output);
        let attend = |input: &Tensor, dy: &Tensor| mixer.backward(&alone, input, chunks, (dy, dy), pass);
        Self::run_module_backward(attention_branch, &x, (&doutput, &dy), attend, pass)?;
        recycle_unless(doutput, &dy, forward);
        Ok(dy)
    }
}
