//! The block with attention and MLP side by side, of one tensor-parallel rank.

use super::{ParallelDecoderLayer, SavedParallel};
use crate::families::decoder_layer::tensor_parallel::gathered_input;
use crate::nn::{
    AttentionExtent, Branch, Layer, LayerContext, LayerError, ParameterSpec, Saved, Saves, TensorRank,
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
        let ParallelDecoderLayer { parameters, attention_branch, attention, mlp, .. } = &self.0;
        let (pass, alone) = (parameters.forward(params, ctx)?, Branch::module_alone());
        let gather = |branch| {
            let (input, normed, rstd) = gathered_input(branch, x, &pass)?;
            recycle_unless(normed, x, &pass);
            pass.recycle([rstd]);
            Ok::<_, LayerError>(input)
        };
        let (input, of_mlp) = (gather(attention_branch)?, self.own_mlp_branch().map(gather).transpose()?);
        let mut chunks = Vec::new();
        let summand = attention.forward(&alone, &input, Saves::Whole, |saved| chunks.push(saved), &pass)?;
        let (output, mlp) = mlp.forward(&alone, of_mlp.as_ref().unwrap_or(&input), true, &pass)?;
        elementwise::accumulate(&summand, &output)?;
        let y = ctx.token_exchange(self.name())?.sum_scatter(&summand)?;
        elementwise::accumulate(&y, x)?;
        pass.recycle([input, summand, output]);
        pass.recycle(of_mlp);
        let saved = SavedParallel { x: x.clone(), attention: chunks, mlp };
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
        let ParallelDecoderLayer { parameters, attention_branch, attention, mlp, .. } = &self.0;
        let SavedParallel { x, attention: chunks, mlp: saved_mlp } = saved.downcast(self.name())?;
        let (pass, alone) = (parameters.backward(params, grads, ctx)?, Branch::module_alone());
        let exchange = ctx.token_exchange(self.name())?;
        let (input, normed, rstd) = gathered_input(attention_branch, &x, &pass.forward)?;
        let own_branch = self.own_mlp_branch();
        let own = own_branch.map(|branch| gathered_input(branch, &x, &pass.forward)).transpose()?;
        let mlp_input = own.as_ref().map_or(&input, |(input, ..)| input);
        // The gradient of the outputs, which each module turns into that of its input.
        let of_attention = exchange.gather(&dy, ctx.seq_len_local())?;
        let of_mlp = ctx.workspace().alloc(of_attention.dims())?;
        strided_copy::copy(&of_attention, &of_mlp)?;
        mlp.backward(&alone, mlp_input, saved_mlp, &of_mlp, &pass)?;
        attention.backward(&alone, &input, chunks, (&of_attention, &of_attention), &pass)?;
        match own_branch.zip(own) {
            None => elementwise::accumulate(&of_attention, &of_mlp)?,
            Some((branch, (input, normed, rstd))) => {
                let dnormed = exchange.sum_scatter(&of_mlp)?;
                branch.backward_enter(&dnormed, &x, &rstd, &dy, &pass)?;
                recycle_unless(normed, &x, &pass.forward);
                pass.forward.recycle([input, rstd, dnormed]);
            }
        }
        let dnormed = exchange.sum_scatter(&of_attention)?;
        attention_branch.backward_enter(&dnormed, &x, &rstd, &dy, &pass)?;
        recycle_unless(normed, &x, &pass.forward);
        pass.forward.recycle([input, rstd, of_attention, of_mlp, dnormed]);
        Ok(dy)
    }
}
