//! The block of one branch.

use super::block::{Block, BlockOutputs, SavedBlock};
use super::{DecoderParts, module_call};
use crate::families::ModelConfig;
use crate::nn::{
    BackwardPass, Branch, BranchGradients, BranchInput, ForwardPass, Layer, LayerError, MixerKept,
    ParameterList, TensorRank, TokenMixer, recycle_unless,
};
use candle_core::Tensor;

/// `y = x + multiplier · module(norm(x))`, where the module is a token mixer or an MLP (Nemotron-H, arXiv 2504.03624).
#[derive(Debug)]
pub struct SingleBranchLayer {
    parameters: ParameterList,
    branch: Branch,
    module: TokenMixer,
}

impl SingleBranchLayer {
    /// Creates layer `index` of a model, with the norm of the attention's branch; that of the MLP's has no meaning here.
    ///
    /// # Panics
    /// If the model has no such layer, the parts have a norm or a factor after a module, or the attention has an output gate.
    pub fn with_parts(config: &ModelConfig, index: usize, parts: DecoderParts) -> Self {
        let after = (parts.attention_norms.after, parts.scalar);
        assert_eq!(after, (None, None), "a layer of one branch has no norm or factor behind its module");
        let has_gate = config.layers[index].attention().is_some_and(|attention| attention.output_gate);
        assert!(!has_gate, "the attention of a layer of one branch has no output gate");
        let mut parameters = ParameterList::new(config.layer_name(index));
        let mixer_parts = parts.mixer_parts(config, config.num_layers());
        let mut module = TokenMixer::new(&mut parameters, config.layers[index], mixer_parts);
        let (norm, factor) = (config.norm(), config.multipliers.residual);
        let branch = Branch::new(&mut parameters, parts.attention_norms, config.hidden_size, norm, factor);
        match &mut module {
            TokenMixer::Mlp(mlp) if config.mlp_bias => mlp.add_biases(&mut parameters, parts.mlp),
            mixer => mixer.add_norms_and_biases(&mut parameters, parts.attention, norm),
        }
        Self { parameters, branch, module }
    }
}

impl Block for SingleBranchLayer {
    fn parameter_list(&self) -> &ParameterList {
        &self.parameters
    }

    fn mixer(&self) -> &TokenMixer {
        &self.module
    }

    fn divide(mut self, tp: TensorRank) -> Result<Box<dyn Layer>, LayerError> {
        self.module.divide(&mut self.parameters, tp)?;
        self.branch = self.branch.residual_by_branch();
        Ok(Box::new(self))
    }

    fn run(
        &self,
        x: &Tensor,
        kept: &mut MixerKept,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, BlockOutputs), LayerError> {
        let Self { branch, module, .. } = self;
        let run = |input: BranchInput<'_>| Ok((module.forward(input, kept, pass)?, ()));
        let output = module_call::run(branch.input(x), run, pass)?.0;
        if module.joins_its_branch() && !branch.has_residual_by_branch() {
            return Ok((output, BlockOutputs::default()));
        }
        let y = branch.join(x, &output, pass)?;
        recycle_unless(output, &y, pass);
        Ok((y, BlockOutputs::default()))
    }

    fn recompute(
        &self,
        x: Tensor,
        kept: &mut impl Iterator<Item = Tensor>,
        pass: &ForwardPass<'_>,
    ) -> Result<SavedBlock, LayerError> {
        let mixer = match self.branch.has_residual_by_branch() {
            true => {
                let input = || module_call::gather_input(self.branch.input(&x), pass);
                self.module.recompute_state(&Branch::residual_by_caller(), input, kept, pass)?
            }
            false => self.module.recompute_state(&self.branch, || Ok(x.clone()), kept, pass)?,
        };
        Ok(SavedBlock { x, mixer, outputs: BlockOutputs::default() })
    }

    fn run_backward(
        &self,
        SavedBlock { x, mixer: saved, .. }: SavedBlock,
        dy: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let Self { branch, module, .. } = self;
        // Without a norm behind the module, its output is not needed.
        let doutput = branch.backward_join(|| Err(pass.forward.foreign_state()), &dy, pass)?;
        let run = |input: BranchInput<'_>, gradients: BranchGradients<'_>| {
            module.backward(input, saved, gradients, pass)
        };
        let gradients = BranchGradients { dy: &doutput, dx: &dy };
        module_call::run_backward(branch.input(&x), gradients, run, pass)?;
        recycle_unless(doutput, &dy, &pass.forward);
        Ok(dy)
    }
}
