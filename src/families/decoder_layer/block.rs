//! The [`Layer`] of blocks of a token mixer, an MLP, or both.

use crate::nn::{
    AttentionExtent, BackwardPass, ForwardPass, Layer, LayerContext, LayerError, MixerKept, MixerSaved,
    MlpSaved, ParameterList, ParameterSpec, Saved, TensorRank, TokenMixer,
};
use candle_core::Tensor;

/// A block of a token mixer, an MLP, or both: what its forms compute. Its [`Layer`] follows from that.
pub(super) trait Block: Send + Sync + Sized + 'static {
    fn parameter_list(&self) -> &ParameterList;

    fn mixer(&self) -> &TokenMixer;

    /// The part of one rank of tp. Not of a block that is one already.
    fn divide(self, tp: TensorRank) -> Result<Box<dyn Layer>, LayerError> {
        let _ = tp;
        Err(LayerError::NoTensorParallelism { layer: self.name().to_owned() })
    }

    /// The result, and for the backward pass what `kept` does not get.
    fn run(
        &self,
        x: &Tensor,
        kept: &mut MixerKept,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, BlockOutputs), LayerError>;

    /// The state of a block that is recomputed, from its input and what its mixer has kept.
    fn recompute(
        &self,
        x: Tensor,
        kept: &mut impl Iterator<Item = Tensor>,
        pass: &ForwardPass<'_>,
    ) -> Result<SavedBlock, LayerError>;

    /// Turns the gradient of the result into that of the input. What is not saved is recomputed.
    fn run_backward(
        &self,
        saved: SavedBlock,
        dy: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError>;
}

/// State of a block that is saved for the backward pass.
pub(super) struct SavedBlock {
    pub(super) x: Tensor,
    pub(super) mixer: Vec<MixerSaved>,
    pub(super) outputs: BlockOutputs,
}

/// The outputs of a block's modules that the backward pass needs.
#[derive(Default)]
pub(super) struct BlockOutputs {
    /// If the MLP's input `mid` follows from it: `mid` itself if the mixer has added its output to `x`, else the mixer's output.
    pub(super) mixer: Option<Tensor>,
    pub(super) mlp_state: Option<MlpSaved>,
    /// The MLP's output, if the gradient of its branch depends on it.
    pub(super) mlp: Option<Tensor>,
}

impl SavedBlock {
    fn bytes(&self) -> usize {
        let Self { x, mixer, outputs } = self;
        let tensors = [x].into_iter().chain(&outputs.mixer).chain(&outputs.mlp);
        tensors.map(ulysses_kernels::tensor::bytes).sum::<usize>()
            + outputs.mlp_state.as_ref().map_or(0, MlpSaved::bytes)
            + mixer.iter().map(MixerSaved::bytes).sum::<usize>()
    }
}

impl<B: Block> Layer for B {
    fn name(&self) -> &str {
        self.parameter_list().layer()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        self.parameter_list().specs()
    }

    fn tensor_parallel(self: Box<Self>, tp: TensorRank) -> Result<Box<dyn Layer>, LayerError> {
        self.divide(tp)
    }

    fn defers_gradients(&self) -> bool {
        true
    }

    fn attention_extent(&self) -> Option<AttentionExtent> {
        self.mixer().extent()
    }

    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError> {
        let mut kept = MixerKept::State(Vec::new());
        let (y, outputs) = self.run(x, &mut kept, &self.parameter_list().forward(params, ctx)?)?;
        let saved = SavedBlock { x: x.clone(), mixer: kept.into_states(), outputs };
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
        self.run_backward(saved, dy, &self.parameter_list().backward(params, grads, ctx)?)
    }

    /// The checkpoint is the input, what the mixer keeps, and its output if the block has one and
    /// [`checkpoint_has_output`](TokenMixer::checkpoint_has_output).
    fn forward_checkpointed(
        &self,
        params: &[Tensor],
        x: Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Vec<Tensor>), LayerError> {
        let pass = self.parameter_list().forward(params, ctx)?;
        let mut kept = MixerKept::Checkpoint(Vec::new());
        let (y, outputs) = self.run(&x, &mut kept, &pass)?;
        let mut checkpoint = kept.into_checkpoint();
        match self.mixer().checkpoint_has_output(ctx) {
            true => checkpoint.extend(outputs.mixer),
            false => pass.recycle(outputs.mixer),
        }
        pass.recycle(outputs.mlp);
        checkpoint.insert(0, x);
        Ok((y, checkpoint))
    }

    fn backward_checkpointed(
        &self,
        params: &[Tensor],
        checkpoint: Vec<Tensor>,
        dy: Tensor,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let pass = self.parameter_list().backward(params, grads, ctx)?;
        let mut checkpoint = checkpoint.into_iter();
        let x = checkpoint.next().ok_or_else(|| pass.forward.foreign_state())?;
        let saved = self.recompute(x, &mut checkpoint, &pass.forward)?;
        self.run_backward(saved, dy, &pass)
    }
}
