//! The block with attention and MLP side by side, of one tensor-parallel rank.

use super::ParallelDecoderLayer;
use crate::families::decoder_layer::block::{Block, BlockOutputs, SavedBlock};
use crate::families::decoder_layer::divided_branch::{gather_input, gathered_input};
use crate::nn::{
    BackwardPass, Branch, ForwardPass, LayerError, MixerKept, ParameterList, TensorRank, TokenMixer,
    recycle_unless,
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
        let input = gather_input(&self.0.attention_branch, x, pass)?;
        let mlp_input = self.own_mlp_branch().map(|branch| gather_input(branch, x, pass)).transpose()?;
        let (alone, keep) = (Branch::module_alone(), kept.is_state());
        let partial = self.0.attention.forward(&alone, &input, kept, pass)?;
        let (output, mlp_state) =
            self.0.mlp.forward(&alone, mlp_input.as_ref().unwrap_or(&input), keep, pass)?;
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
        let input = || gather_input(&self.0.attention_branch, &x, pass);
        let mixer = self.0.attention.recompute_state(&Branch::module_alone(), input, kept, pass)?;
        Ok(SavedBlock { x, mixer, outputs: BlockOutputs::default() })
    }

    fn run_backward(
        &self,
        SavedBlock { x, mixer: chunks, outputs }: SavedBlock,
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
        mlp.backward(&alone, mlp_input, outputs.mlp_state, &of_mlp, pass)?;
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
}
