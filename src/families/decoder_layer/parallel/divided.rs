//! The block with attention and MLP side by side, of one tensor-parallel rank.

use super::{ParallelDecoderLayer, SavedParallel};
use crate::families::decoder_layer::tensor_parallel::gathered_input;
use crate::nn::{
    AttentionExtent, BackwardPass, Branch, ForwardPass, Layer, LayerContext, LayerError, MlpSaved,
    ParameterSpec, Saved, Saves, TensorRank, recycle_unless,
};
use candle_core::Tensor;
use ulysses_kernels::{elementwise, strided_copy};

/// A [`ParallelDecoderLayer`] with the heads and intermediate elements of one rank of tp. Tokens are gathered once for both modules,
/// or behind each of two norms, and the sum of their outputs is summed and scattered.
pub(super) struct DividedParallelDecoder(ParallelDecoderLayer);

impl DividedParallelDecoder {
    /// Keeps the part of one rank.
    ///
    /// # Errors
    /// A layer that cannot be divided over so many ranks.
    pub(super) fn new(mut layer: ParallelDecoderLayer, tp: TensorRank) -> Result<Self, LayerError> {
        layer.attention.divide(&mut layer.parameters, tp)?;
        layer.mlp.divide(&mut layer.parameters, tp)?;
        Ok(Self(layer))
    }

    /// The result of the layer, with the MLP's state if `keep`. `attend` turns the attention's input into its part of the output.
    fn run(
        &self,
        x: &Tensor,
        attend: impl FnOnce(&Tensor) -> Result<Tensor, LayerError>,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<MlpSaved>), LayerError> {
        let input = gather_input(&self.0.attention_branch, x, pass)?;
        let mlp_input = self.own_mlp_branch().map(|branch| gather_input(branch, x, pass)).transpose()?;
        let partial = attend(&input)?;
        let alone = Branch::module_alone();
        let (output, mlp) = self.0.mlp.forward(&alone, mlp_input.as_ref().unwrap_or(&input), keep, pass)?;
        elementwise::accumulate(&partial, &output)?;
        let y = pass.ctx.token_exchange(pass.layer)?.reduce_scatter(&partial)?;
        elementwise::accumulate(&y, x)?;
        pass.recycle([input, partial, output]);
        pass.recycle(mlp_input);
        Ok((y, mlp))
    }

    /// Turns the gradient of the result into that of the input. What is not saved is recomputed.
    fn backward_saved(
        &self,
        SavedParallel { x, attention: chunks, mlp: saved_mlp }: SavedParallel,
        dy: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let ParallelDecoderLayer { attention_branch, attention, mlp, .. } = &self.0;
        let (forward, alone) = (&pass.forward, Branch::module_alone());
        let exchange = forward.ctx.token_exchange(forward.layer)?;
        let (input, normed, rstd) = gathered_input(attention_branch, &x, forward)?;
        let own_branch = self.own_mlp_branch();
        let own = own_branch.map(|branch| gathered_input(branch, &x, forward)).transpose()?;
        let mlp_input = own.as_ref().map_or(&input, |(input, ..)| input);
        // The gradient of the outputs, which each module turns into that of its input.
        let of_attention = exchange.all_gather(&dy, forward.ctx.seq_len_local())?;
        let of_mlp = forward.workspace().alloc(of_attention.dims())?;
        strided_copy::copy(&of_attention, &of_mlp)?;
        mlp.backward(&alone, mlp_input, saved_mlp, &of_mlp, pass)?;
        attention.backward(&alone, &input, chunks, (&of_attention, &of_attention), pass)?;
        match own_branch.zip(own) {
            None => elementwise::accumulate(&of_attention, &of_mlp)?,
            Some((branch, (input, normed, rstd))) => {
                let dnormed = exchange.reduce_scatter(&of_mlp)?;
                branch.backward_enter(&dnormed, &x, &rstd, &dy, pass)?;
                recycle_unless(normed, &x, forward);
                forward.recycle([input, rstd, dnormed]);
            }
        }
        let dnormed = exchange.reduce_scatter(&of_attention)?;
        attention_branch.backward_enter(&dnormed, &x, &rstd, &dy, pass)?;
        recycle_unless(normed, &x, forward);
        forward.recycle([input, rstd, of_attention, of_mlp, dnormed]);
        Ok(dy)
    }

    /// The branch of the MLP, if it has a norm of its own.
    fn own_mlp_branch(&self) -> Option<&Branch> {
        self.0.has_two_norms.then_some(&self.0.mlp_branch)
    }
}

impl Layer for DividedParallelDecoder {
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
            self.0.attention.forward(&Branch::module_alone(), input, Saves::Whole, keep, &pass)
        };
        let (y, mlp) = self.run(x, attend, true, &pass)?;
        let saved = SavedParallel { x: x.clone(), attention, mlp };
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
            self.0.attention.forward_checkpointed(&Branch::module_alone(), input, &mut kept, &pass)
        };
        let (y, _) = self.run(&x, attend, false, &pass)?;
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
        let mut checkpoint = checkpoint.into_iter();
        let foreign = || LayerError::ForeignSavedState { layer: self.name().to_owned() };
        let x = checkpoint.next().ok_or_else(foreign)?;
        let (alone, forward) = (Branch::module_alone(), &pass.forward);
        let input = || gather_input(&self.0.attention_branch, &x, forward);
        let attention = self.0.attention.recompute_state(&alone, input, &mut checkpoint, forward)?;
        self.backward_saved(SavedParallel { x, attention, mlp: None }, dy, &pass)
    }
}

/// The input of a branch's module, for all tokens.
fn gather_input(branch: &Branch, x: &Tensor, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
    let (input, normed, rstd) = gathered_input(branch, x, pass)?;
    recycle_unless(normed, x, pass);
    pass.recycle([rstd]);
    Ok(input)
}
