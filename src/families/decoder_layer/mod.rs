//! The decoder block.

mod block;
mod module_call;
mod parallel;
mod single_branch;

pub use parallel::ParallelDecoderLayer;
pub use single_branch::SingleBranchLayer;

use crate::families::ModelConfig;
use crate::nn::{
    AttentionProjections, BackwardPass, Branch, BranchGradients, BranchInput, BranchNorms,
    DeltaNetProjections, ForwardPass, Init, Layer, LayerError, LinearAttentionProjections, MixerConfig,
    MixerKept, MixerParts, Mlp, MlpConfig, MlpProjections, MlpSaved, ModuleWeights, Parameter, ParameterList,
    TensorRank, TokenMixer, WeightLayout, WeightSpec, recycle_unless,
};
use block::{Block, BlockOutputs, SavedBlock};
use candle_core::Tensor;
use ulysses_kernels::elementwise;
use ulysses_kernels::glu::Activation;

/// An attention branch and an MLP branch. The attention may be another [`TokenMixer`].
///
/// ```text
/// mid = x + multiplier · norm(attention(norm(x)))
/// y = mid + multiplier · norm(mlp(norm(mid)))
/// ```
///
/// [`Llama`](DecoderParts::LLAMA) (arXiv 2302.13971) has the inner norms only, and a multiplier of 1. Families choose their
/// [`DecoderParts`].
///
/// On a rank of tp both modules are parts, whose residuals their [branches add](Branch::residual_by_branch): these have some of the tokens.
///
/// [`Tiling`](crate::nn::Tiling) limits memory: the MLP runs in tiles of tokens, the attention in head chunks.
#[derive(Debug)]
pub struct DecoderLayer {
    parameters: ParameterList,
    attention_branch: Branch,
    mixer: TokenMixer,
    mlp_branch: Branch,
    mlp: Mlp,
    scalar: Option<Parameter>,
}

/// The parts of a [`DecoderLayer`] that differ between families.
#[derive(Debug, Clone, Copy)]
pub struct DecoderParts {
    /// The norms of the attention branch.
    pub attention_norms: BranchNorms,
    /// The norms of the MLP branch.
    pub mlp_norms: BranchNorms,
    /// The projections of the attention.
    pub attention: AttentionProjections,
    /// The projections of a linear attention.
    pub linear_attention: LinearAttentionProjections,
    /// The projections of the MLP.
    pub mlp: MlpProjections,
    /// The dimensions of their weights.
    pub weights: WeightLayout,
    /// The activation of the MLP, or of its gate.
    pub activation: Activation,
    /// A constant factor on the result of the layer, which is stored with the weights.
    pub scalar: Option<&'static str>,
}

impl DecoderParts {
    /// A norm before each module, and SwiGLU.
    pub const LLAMA: Self = Self {
        attention_norms: BranchNorms { before: Some("input_layernorm"), after: None },
        mlp_norms: BranchNorms { before: Some("post_attention_layernorm"), after: None },
        attention: AttentionProjections::LLAMA,
        linear_attention: LinearAttentionProjections { mamba: "mamba", delta_net: DeltaNetProjections::Each },
        mlp: MlpProjections::LLAMA,
        weights: WeightLayout::OutIn,
        activation: Activation::Silu,
        scalar: None,
    };

    /// As Llama, with the norms after the modules instead of before.
    pub const NORMS_AFTER: Self = Self {
        attention_norms: BranchNorms { before: None, after: Some("post_attention_layernorm") },
        mlp_norms: BranchNorms { before: None, after: Some("post_feedforward_layernorm") },
        ..Self::LLAMA
    };

    /// Adds the parameters of both modules of layer `index` of a model, without biases and norms of queries and keys.
    fn modules(
        self,
        config: &ModelConfig,
        index: usize,
        parameters: &mut ParameterList,
    ) -> (TokenMixer, Mlp) {
        assert_ne!(config.layers[index], MixerConfig::Mlp, "a layer with an MLP alone has one branch");
        let parts = self.mixer_parts(config, 2 * config.num_layers());
        let mixer = TokenMixer::new(parameters, config.layers[index], parts);
        (mixer, Mlp::new(parameters, self.mlp, parts.hidden_size, parts.mlp_config, parts.weights))
    }

    /// The parts of token mixers. The projections that write to the residual stream start smaller, by the square root of their number
    /// (GPT-2, section 2.3), so that the variance does not grow with depth.
    fn mixer_parts(self, config: &ModelConfig, num_branches: usize) -> MixerParts {
        let Self { attention, linear_attention, mlp, activation, weights: layout, .. } = self;
        let weight = |std| WeightSpec { init: Init::Normal { std }, layout };
        let std = config.initializer_range;
        MixerParts {
            attention,
            linear_attention,
            mlp,
            mlp_config: MlpConfig { intermediate_size: config.intermediate_size, activation },
            hidden_size: config.hidden_size,
            norm: config.norm(),
            weights: ModuleWeights { input: weight(std), output: weight(std / (num_branches as f64).sqrt()) },
        }
    }

    /// Adds the norms of queries and keys, then the biases of the modules, if there are any.
    fn add_norms_and_biases(
        self,
        config: &ModelConfig,
        mixer: &mut TokenMixer,
        mlp: &mut Mlp,
        parameters: &mut ParameterList,
    ) {
        mixer.add_norms_and_biases(parameters, self.attention, config.norm());
        if config.mlp_bias {
            mlp.add_biases(parameters, self.mlp);
        }
    }
}

impl DecoderLayer {
    /// Creates layer `index` of a model, with the parts of Llama.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn new(config: &ModelConfig, index: usize) -> Self {
        Self::with_parts(config, index, DecoderParts::LLAMA)
    }

    /// Creates layer `index` of a model.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn with_parts(config: &ModelConfig, index: usize, parts: DecoderParts) -> Self {
        // Partitions and checkpoints depend on this order.
        let mut parameters = ParameterList::new(config.layer_name(index));
        let (mut mixer, mut mlp) = parts.modules(config, index, &mut parameters);
        let [attention_branch, mlp_branch] = [parts.attention_norms, parts.mlp_norms].map(|norms| {
            Branch::new(
                &mut parameters,
                norms,
                config.hidden_size,
                config.norm(),
                config.multipliers.residual,
            )
        });
        parts.add_norms_and_biases(config, &mut mixer, &mut mlp, &mut parameters);
        let scalar = parts.scalar.map(|name| parameters.add_constant(name, [1], Init::Ones));
        Self { parameters, attention_branch, mixer, mlp_branch, mlp, scalar }
    }

    /// The output of the MLP, with its state if `keep`. It has joined its branch, unless ranks of tp divide it.
    fn run_mlp(
        &self,
        mid: &Tensor,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<MlpSaved>), LayerError> {
        let run = |input: BranchInput<'_>| self.mlp.forward(input, keep, pass);
        module_call::run(self.mlp_branch.input(mid), run, pass)
    }

    /// Multiplies the result of the layer, or its gradient, by the constant factor, if there is one.
    fn multiply(&self, y: &Tensor, pass: &ForwardPass<'_>) -> Result<(), LayerError> {
        match self.scalar {
            Some(scalar) => Ok(elementwise::scale_by(y, &pass[scalar])?),
            None => Ok(()),
        }
    }
}

impl Block for DecoderLayer {
    fn parameter_list(&self) -> &ParameterList {
        &self.parameters
    }

    fn mixer(&self) -> &TokenMixer {
        &self.mixer
    }

    fn divide(mut self, tp: TensorRank) -> Result<Box<dyn Layer>, LayerError> {
        self.mixer.divide(&mut self.parameters, tp)?;
        self.mlp.divide(&mut self.parameters, tp)?;
        self.attention_branch = self.attention_branch.residual_by_branch();
        self.mlp_branch = self.mlp_branch.residual_by_branch();
        Ok(Box::new(self))
    }

    fn run(
        &self,
        x: &Tensor,
        kept: &mut MixerKept,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, BlockOutputs), LayerError> {
        let Self { attention_branch, mixer, mlp_branch, .. } = self;
        let attend = |input: BranchInput<'_>| Ok((mixer.forward(input, kept, pass)?, ()));
        let output = module_call::run(attention_branch.input(x), attend, pass)?.0;
        let mid = attention_branch.join(x, &output, pass)?;
        let (mut y, mlp_state) = self.run_mlp(&mid, kept.is_state(), pass)?;
        let mut mlp = None;
        if mlp_branch.has_residual_by_branch() {
            let joined = mlp_branch.join(&mid, &y, pass)?;
            mlp = Some(std::mem::replace(&mut y, joined));
        }
        if !mlp_branch.needs_output() {
            pass.recycle(mlp.take());
        }
        recycle_unless(mid, &output, pass);
        self.multiply(&y, pass)?;
        Ok((y, BlockOutputs { mixer: Some(output), mlp_state, mlp }))
    }

    fn recompute(
        &self,
        x: Tensor,
        kept: &mut impl Iterator<Item = Tensor>,
        pass: &ForwardPass<'_>,
    ) -> Result<SavedBlock, LayerError> {
        let Self { attention_branch, mixer, mlp_branch, .. } = self;
        let (output, mixer) = match mixer.checkpoint_has_output(pass.ctx) {
            true => (kept.next().ok_or_else(|| pass.foreign_state())?, Vec::new()),
            false => {
                let recompute = |input: BranchInput<'_>| mixer.recompute(input, kept, pass);
                module_call::run(attention_branch.input(&x), recompute, pass)?
            }
        };
        let mut mlp = None;
        if mlp_branch.has_residual_by_branch() && mlp_branch.needs_output() {
            let mid = attention_branch.join(&x, &output, pass)?;
            mlp = Some(self.run_mlp(&mid, false, pass)?.0);
            pass.recycle([mid]);
        }
        Ok(SavedBlock { x, mixer, outputs: BlockOutputs { mixer: Some(output), mlp_state: None, mlp } })
    }

    fn run_backward(
        &self,
        SavedBlock { x, mixer: saved, outputs }: SavedBlock,
        dy: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let Self { attention_branch, mixer, mlp_branch, mlp, .. } = self;
        let forward = &pass.forward;
        let BlockOutputs { mixer: output, mlp_state, mlp: mlp_output } = outputs;
        let output = output.ok_or_else(|| forward.foreign_state())?;
        self.multiply(&dy, forward)?;
        let mid = attention_branch.join(&x, &output, forward)?;
        let doutput = match mlp_branch.has_residual_by_branch() {
            true => {
                mlp_branch.backward_join(|| mlp_output.ok_or_else(|| forward.foreign_state()), &dy, pass)?
            }
            false => dy.clone(),
        };
        // Without tp, `dx` is the gradient of the branch's result. The MLP turns it into that of `mid`, and does not need `dy`: it joins
        // its branch itself. With tp, `dx` and `dy` are one tensor: the gathered gradient of the MLP's output, which becomes that of its
        // input.
        let run_mlp = |input: BranchInput<'_>, gradients: BranchGradients<'_>| {
            mlp.backward(input, mlp_state, gradients.dx, pass)
        };
        let gradients = BranchGradients { dy: &doutput, dx: &dy };
        module_call::run_backward(mlp_branch.input(&mid), gradients, run_mlp, pass)?;
        recycle_unless(doutput, &dy, forward);
        recycle_unless(mid, &output, forward);
        let mut output = Some(output);
        let take = || output.take().ok_or_else(|| forward.foreign_state());
        let doutput = attention_branch.backward_join(take, &dy, pass)?;
        forward.recycle(output);
        let attend = |input: BranchInput<'_>, gradients: BranchGradients<'_>| {
            mixer.backward(input, saved, gradients, pass)
        };
        let gradients = BranchGradients { dy: &doutput, dx: &dy };
        module_call::run_backward(attention_branch.input(&x), gradients, attend, pass)?;
        recycle_unless(doutput, &dy, forward);
        Ok(dy)
    }
}
