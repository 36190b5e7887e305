//! The block with attention and MLP side by side, of one tensor-parallel rank.

use super::ParallelDecoderLayer;
use crate::families::decoder_layer::block::{Block, BlockOutputs, SavedBlock};
use crate::families::decoder_layer::module_call::{GatheredInput, gather_input};
use crate::nn::{
    BackwardPass, Branch, BranchGradients, ForwardPass, LayerError, MixerKept, ParameterList, TensorRank,
    TokenMixer,
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

    /// The branch of the MLP, if it has a norm of its own.
    fn own_mlp_branch(&self) -> Option<&Branch> {
        self.0.has_two_norms.then_some(&self.0.mlp_branch)
    }
}

impl Block for DividedParallelDecoder {
    fn parameter_list(&self) -> &ParameterList {
        &self.0.parameters
    }

    fn mixer(&self) -> &TokenMixer {
        &self.0.attention
    }

    fn run(
        &self,
        x: &Tensor,
        kept: &mut MixerKept,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, BlockOutputs), LayerError> {
        let input = gather_input(self.0.attention_branch.input(x), pass)?;
        let own = self.own_mlp_branch().map(|branch| gather_input(branch.input(x), pass));
        let mlp_input = own.transpose()?;
        let (alone, keep) = (Branch::residual_by_caller(), kept.is_state());
        let partial = self.0.attention.forward(alone.input(&input), kept, pass)?;
        let of_mlp = alone.input(mlp_input.as_ref().unwrap_or(&input));
        let (output, mlp_state) = self.0.mlp.forward(of_mlp, keep, pass)?;
        elementwise::accumulate(&partial, &output)?;
        let y = pass.ctx.token_exchange(pass.layer)?.reduce_scatter(&partial)?;
        elementwise::accumulate(&y, x)?;
        pass.recycle([input, partial, output]);
        pass.recycle(mlp_input);
        Ok((y, BlockOutputs { mlp_state, ..BlockOutputs::default() }))
    }

    fn recompute(
        &self,
        x: Tensor,
        kept: &mut impl Iterator<Item = Tensor>,
        pass: &ForwardPass<'_>,
    ) -> Result<SavedBlock, LayerError> {
        let input = || gather_input(self.0.attention_branch.input(&x), pass);
        let mixer = self.0.attention.recompute_state(&Branch::residual_by_caller(), input, kept, pass)?;
        Ok(SavedBlock { x, mixer, outputs: BlockOutputs::default() })
    }

    fn run_backward(
        &self,
        SavedBlock { x, mixer: chunks, outputs }: SavedBlock,
        dy: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let ParallelDecoderLayer { attention_branch, attention, mlp, .. } = &self.0;
        let (forward, alone) = (&pass.forward, Branch::residual_by_caller());
        let exchange = forward.ctx.token_exchange(forward.layer)?;
        let gathered = GatheredInput::new(attention_branch.input(&x), forward)?;
        let own_input = self.own_mlp_branch().map(|branch| branch.input(&x));
        let own = own_input.map(|input| GatheredInput::new(input, forward)).transpose()?;
        let mlp_input = &own.as_ref().unwrap_or(&gathered).all;
        // The gradient of the outputs, which each module turns into that of its input.
        let of_attention = exchange.all_gather(&dy, forward.ctx.seq_len_local())?;
        let of_mlp = forward.workspace().alloc(of_attention.dims())?;
        strided_copy::copy(&of_attention, &of_mlp)?;
        mlp.backward(alone.input(mlp_input), outputs.mlp_state, &of_mlp, pass)?;
        let gradients = BranchGradients { dy: &of_attention, dx: &of_attention };
        attention.backward(alone.input(&gathered.all), chunks, gradients, pass)?;
        match own_input.zip(own) {
            None => elementwise::accumulate(&of_attention, &of_mlp)?,
            Some((input, own)) => own.backward(input, &of_mlp, &dy, pass)?,
        }
        gathered.backward(attention_branch.input(&x), &of_attention, &dy, pass)?;
        forward.recycle([of_attention, of_mlp]);
        Ok(dy)
    }
}
