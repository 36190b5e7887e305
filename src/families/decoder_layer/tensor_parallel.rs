//! The decoder block of one tensor-parallel rank.

use super::DecoderLayer;
use crate::nn::{
    AttentionExtent, BackwardPass, Branch, ForwardPass, Layer, LayerContext, LayerError, MixerSaved,
    MlpSaved, ParameterSpec, Saved, Saves, TensorRank, recycle_unless,
};
use candle_core::Tensor;
use ulysses_kernels::tensor;

/// A [`DecoderLayer`] with the heads and intermediate elements of one rank of tp.
///
/// Norms and residual stream have some tokens per rank. Around a module, tokens are gathered, and its outputs, which are
/// partial sums, summed and scattered: the same bytes as an all-reduce of whole activations (arXiv 2205.05198, section 4.2.2).
pub(super) struct TensorParallelDecoder(DecoderLayer);

/// State saved for the backward pass.
struct SavedDecoder {
    x: Tensor,
    attention: Vec<MixerSaved>,
    attention_output: Tensor,
    mlp: Option<MlpSaved>,
    /// If its gradient depends on it.
    mlp_output: Option<Tensor>,
}

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
    fn run<T>(
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
        Self::run(&self.0.mlp_branch, mid, run, pass)
    }

    /// Turns the gradient of the result into that of the input. What is not saved is recomputed.
    fn backward_saved(
        &self,
        SavedDecoder { x, attention: chunks, attention_output, mlp: saved_mlp, mlp_output }: SavedDecoder,
        dy: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let DecoderLayer { attention_branch, mixer, mlp_branch, mlp, .. } = &self.0;
        let (forward, alone) = (&pass.forward, Branch::module_alone());
        self.0.multiply(&dy, forward)?;
        let mid = attention_branch.join(&x, &attention_output, forward)?;
        let doutput = mlp_branch.backward_join(|| mlp_output.ok_or_else(|| self.foreign()), &dy, pass)?;
        let run_mlp = |input: &Tensor, dy: &Tensor| mlp.backward(&alone, input, saved_mlp, dy, pass);
        Self::run_backward(mlp_branch, &mid, (&doutput, &dy), run_mlp, pass)?;
        recycle_unless(doutput, &dy, forward);
        forward.recycle([mid]);
        let mut attention_output = Some(attention_output);
        let take = || attention_output.take().ok_or_else(|| self.foreign());
        let doutput = attention_branch.backward_join(take, &dy, pass)?;
        forward.recycle(attention_output);
        let attend = |input: &Tensor, dy: &Tensor| mixer.backward(&alone, input, chunks, (dy, dy), pass);
        Self::run_backward(attention_branch, &x, (&doutput, &dy), attend, pass)?;
        recycle_unless(doutput, &dy, forward);
        Ok(dy)
    }

    fn foreign(&self) -> LayerError {
        LayerError::ForeignSavedState { layer: self.name().to_owned() }
    }

    /// Backward of [`run`](Self::run): adds to `dx`. `module` turns the gradient of its output into that of its input.
    fn run_backward(
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

impl Layer for TensorParallelDecoder {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        self.0.parameters()
    }

    fn attention_extent(&self) -> Option<AttentionExtent> {
        self.0.attention_extent()
    }

    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError> {
        let pass = self.0.parameters.forward(params, ctx)?;
        let mut attention = Vec::new();
        let keep = |saved| attention.push(saved);
        let attend = |input: &Tensor| {
            let alone = Branch::module_alone();
            Ok((self.0.mixer.forward(&alone, input, Saves::Whole, keep, &pass)?, ()))
        };
        let attention_output = Self::run(&self.0.attention_branch, x, attend, &pass)?.0;
        let mid = self.0.attention_branch.join(x, &attention_output, &pass)?;
        let (output, mlp) = self.run_mlp(&mid, true, &pass)?;
        let y = self.0.mlp_branch.join(&mid, &output, &pass)?;
        self.0.multiply(&y, &pass)?;
        pass.recycle([mid]);
        let mut mlp_output = Some(output);
        if !self.0.mlp_branch.needs_output() {
            pass.recycle(mlp_output.take());
        }
        let saved = SavedDecoder { x: x.clone(), attention, attention_output, mlp, mlp_output };
        let bytes = saved.bytes();
        Ok((y, Saved::new(saved, bytes)))
    }

    fn backward(
        &self,
        params: &[Tensor],
        saved: Saved,
        dy: Tensor,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let saved = saved.downcast(self.name())?;
        self.backward_saved(saved, dy, &self.0.parameters.backward(params, grads, ctx)?)
    }

    /// The checkpoint is that of a whole layer, with this rank's heads.
    fn forward_checkpointed(
        &self,
        params: &[Tensor],
        x: Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Vec<Tensor>), LayerError> {
        let pass = self.0.parameters.forward(params, ctx)?;
        let mut kept = Vec::new();
        let attend = |input: &Tensor| {
            let alone = Branch::module_alone();
            Ok((self.0.mixer.forward_checkpointed(&alone, input, &mut kept, &pass)?, ()))
        };
        let attention_output = Self::run(&self.0.attention_branch, &x, attend, &pass)?.0;
        let mid = self.0.attention_branch.join(&x, &attention_output, &pass)?;
        let (output, _) = self.run_mlp(&mid, false, &pass)?;
        let y = self.0.mlp_branch.join(&mid, &output, &pass)?;
        self.0.multiply(&y, &pass)?;
        pass.recycle([mid, output]);
        match self.0.keeps_attention_output(ctx) {
            true => kept.push(attention_output),
            false => pass.recycle([attention_output]),
        }
        kept.insert(0, x);
        Ok((y, kept))
    }

    fn backward_checkpointed(
        &self,
        params: &[Tensor],
        checkpoint: Vec<Tensor>,
        dy: Tensor,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let pass = self.0.parameters.backward(params, grads, ctx)?;
        let forward = &pass.forward;
        let mut checkpoint = checkpoint.into_iter();
        let x = checkpoint.next().ok_or_else(|| self.foreign())?;
        let (attention_output, attention) = match self.0.keeps_attention_output(ctx) {
            true => (checkpoint.next().ok_or_else(|| self.foreign())?, Vec::new()),
            false => {
                let recompute = |input: &Tensor| {
                    self.0.mixer.recompute(&Branch::module_alone(), input, &mut checkpoint, forward)
                };
                Self::run(&self.0.attention_branch, &x, recompute, forward)?
            }
        };
        let mut mlp_output = None;
        if self.0.mlp_branch.needs_output() {
            let mid = self.0.attention_branch.join(&x, &attention_output, forward)?;
            mlp_output = Some(self.run_mlp(&mid, false, forward)?.0);
            forward.recycle([mid]);
        }
        let saved = SavedDecoder { x, attention, attention_output, mlp: None, mlp_output };
        self.backward_saved(saved, dy, &pass)
    }
}

impl SavedDecoder {
    fn bytes(&self) -> usize {
        let Self { x, attention, attention_output, mlp, mlp_output } = self;
        let own: usize = [x, attention_output].into_iter().chain(mlp_output).map(tensor::bytes).sum();
        own + mlp.as_ref().map_or(0, MlpSaved::bytes) + attention.iter().map(MixerSaved::bytes).sum::<usize>()
    }
}
