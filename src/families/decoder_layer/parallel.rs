//! The block of which attention and MLP have the same input.

mod divided;

use super::DecoderParts;
use super::block::{Block, BlockOutputs, SavedBlock};
use crate::families::ModelConfig;
use crate::nn::{
    BackwardPass, Branch, BranchGradients, ForwardPass, Layer, LayerError, MixerKept, Mlp, MlpSaved,
    ParameterList, TensorRank, TokenMixer,
};
use candle_core::Tensor;
use divided::DividedParallelDecoder;
use ulysses_kernels::{elementwise, strided_copy};

/// `y = x + attention(norm(x)) + mlp(norm(x))`, with one norm (GPT-J, Cohere) or two (GPT-NeoX).
#[derive(Debug)]
pub struct ParallelDecoderLayer {
    parameters: ParameterList,
    attention_branch: Branch,
    attention: TokenMixer,
    /// Behind its own norm or that of the attention.
    mlp_branch: Branch,
    mlp: Mlp,
    has_two_norms: bool,
}

impl ParallelDecoderLayer {
    /// Creates layer `index` of a model. Without a norm before the MLP, both modules have that of the attention.
    ///
    /// # Panics
    /// If the model has no such layer, the parts have a norm after a module, or the attention has an output gate.
    pub fn with_parts(config: &ModelConfig, index: usize, parts: DecoderParts) -> Self {
        let norms_after = [parts.attention_norms.after, parts.mlp_norms.after];
        assert_eq!(norms_after, [None; 2], "modules side by side have no norms behind them");
        let has_gate = config.layers[index].attention().is_some_and(|attention| attention.output_gate);
        assert!(!has_gate, "an attention beside an MLP has no output gate");
        let mut parameters = ParameterList::new(config.layer_name(index));
        let (mut attention, mut mlp) = parts.modules(config, index, &mut parameters);
        let mut branch = |norms| Branch::new(&mut parameters, norms, config.hidden_size, config.norm(), 1.0);
        let attention_branch = branch(parts.attention_norms);
        let mlp_branch = match parts.mlp_norms.before {
            Some(_) => branch(parts.mlp_norms).module_beside(),
            None => attention_branch.module_beside(),
        };
        parts.add_norms_and_biases(config, &mut attention, &mut mlp, &mut parameters);
        let has_two_norms = parts.mlp_norms.before.is_some();
        Self { parameters, attention_branch, attention, mlp_branch, mlp, has_two_norms }
    }

    /// Adds the output of the MLP to `y`. Returns its state if `keep`.
    fn add_mlp(
        &self,
        x: &Tensor,
        y: &Tensor,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<Option<MlpSaved>, LayerError> {
        let (output, saved) = self.mlp.forward(self.mlp_branch.input(x), keep, pass)?;
        elementwise::accumulate(y, &output)?;
        pass.recycle([output]);
        Ok(saved)
    }
}

impl Block for ParallelDecoderLayer {
    fn parameter_list(&self) -> &ParameterList {
        &self.parameters
    }

    fn mixer(&self) -> &TokenMixer {
        &self.attention
    }

    fn divide(self, tp: TensorRank) -> Result<Box<dyn Layer>, LayerError> {
        Ok(Box::new(DividedParallelDecoder::new(self, tp)?))
    }

    fn run(
        &self,
        x: &Tensor,
        kept: &mut MixerKept,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, BlockOutputs), LayerError> {
        let y = self.attention.forward(self.attention_branch.input(x), kept, pass)?;
        let mlp_state = self.add_mlp(x, &y, kept.is_state(), pass)?;
        Ok((y, BlockOutputs { mlp_state, ..BlockOutputs::default() }))
    }

    fn recompute(
        &self,
        x: Tensor,
        kept: &mut impl Iterator<Item = Tensor>,
        pass: &ForwardPass<'_>,
    ) -> Result<SavedBlock, LayerError> {
        let input = || Ok(x.clone());
        let mixer = self.attention.recompute_state(&self.attention_branch, input, kept, pass)?;
        Ok(SavedBlock { x, mixer, outputs: BlockOutputs::default() })
    }

    fn run_backward(
        &self,
        SavedBlock { x, mixer, outputs }: SavedBlock,
        dy: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        // The gradient of the sum is that of `x`, to which both modules add theirs.
        let dx = pass.forward.workspace().alloc(dy.dims())?;
        strided_copy::copy(&dy, &dx)?;
        self.mlp.backward(self.mlp_branch.input(&x), outputs.mlp_state, &dx, pass)?;
        let gradients = BranchGradients { dy: &dy, dx: &dx };
        self.attention.backward(self.attention_branch.input(&x), mixer, gradients, pass)?;
        pass.forward.recycle([dy]);
        Ok(dx)
    }
}
