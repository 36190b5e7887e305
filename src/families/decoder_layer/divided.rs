//! The decoder block of one tensor-parallel rank.

use super::block::{Block, BlockOutputs, SavedBlock, foreign};
use super::{DecoderLayer, divided_branch};
use crate::nn::{
    BackwardPass, Branch, BranchGradients, ForwardPass, LayerError, MixerKept, MlpSaved, ParameterList,
    TensorRank, TokenMixer, recycle_unless,
};
use candle_core::Tensor;

/// A [`DecoderLayer`] with the heads and intermediate elements of one rank of tp, and some of the tokens around its
/// [modules](divided_branch).
pub(super) struct DividedDecoder(DecoderLayer);

impl DividedDecoder {
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

    /// The MLP's output, with its state if `keep`.
    fn run_mlp(
        &self,
        mid: &Tensor,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<MlpSaved>), LayerError> {
        let run = |input: &Tensor| self.0.mlp.forward(Branch::module_alone().input(input), keep, pass);
        divided_branch::run(self.0.mlp_branch.input(mid), run, pass)
    }
}

impl Block for DividedDecoder {
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
        let attend =
            |input: &Tensor| Ok((mixer.forward(Branch::module_alone().input(input), kept, pass)?, ()));
        let attention_output = divided_branch::run(attention_branch.input(x), attend, pass)?.0;
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
                let recompute =
                    |input: &Tensor| mixer.recompute(Branch::module_alone().input(input), kept, pass);
                divided_branch::run(attention_branch.input(&x), recompute, pass)?
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
        let gradients = BranchGradients { dy: &doutput, dx: &dy };
        let run_mlp = |input: &Tensor, dy: &Tensor| mlp.backward(alone.input(input), mlp_state, dy, pass);
        divided_branch::run_backward(mlp_branch.input(&mid), gradients, run_mlp, pass)?;
        recycle_unless(doutput, &dy, forward);
        forward.recycle([mid]);
        let mut attention_output = Some(attention_output);
        let take = || attention_output.take().ok_or_else(|| foreign(forward));
        let doutput = attention_branch.backward_join(take, &dy, pass)?;
        forward.recycle(attention_output);
        let gradients = BranchGradients { dy: &doutput, dx: &dy };
        let attend = |input: &Tensor, dy: &Tensor| {
            mixer.backward(alone.input(input), chunks, BranchGradients { dy, dx: dy }, pass)
        };
        divided_branch::run_backward(attention_branch.input(&x), gradients, attend, pass)?;
        recycle_unless(doutput, &dy, forward);
        Ok(dy)
    }
}
