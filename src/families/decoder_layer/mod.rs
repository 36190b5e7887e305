//! The decoder block.

mod block;
mod divided;
mod divided_branch;
mod parallel;
mod single_branch;

pub use parallel::ParallelDecoderLayer;
pub use single_branch::SingleBranchLayer;

use crate::families::ModelConfig;
use crate::nn::{
    AttentionProjections, BackwardPass, Branch, BranchGradients, BranchNorms, DeltaNetProjections,
    ForwardPass, Init, Layer, LayerError, LinearAttentionProjections, MixerConfig, MixerKept, MixerParts,
    Mlp, MlpConfig, MlpProjections, ModuleWeights, Parameter, ParameterList, TensorRank, TokenMixer,
    WeightLayout, WeightSpec, recycle_unless,
};
use block::{Block, BlockOutputs, SavedBlock, foreign};
use candle_core::Tensor;
use divided::DividedDecoder;
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

    /// The input of the MLP; the same tensor as the attention's output if that has `x`.
    fn mid(
        &self,
        x: &Tensor,
        attention_output: &Tensor,
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        self.attention_branch.join(x, attention_output, pass)
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

    fn divide(self, tp: TensorRank) -> Result<Box<dyn Layer>, LayerError> {
        Ok(Box::new(DividedDecoder::new(self, tp)?))
    }

    fn run(
        &self,
        x: &Tensor,
        kept: &mut MixerKept,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, BlockOutputs), LayerError> {
        let output = self.mixer.forward(self.attention_branch.input(x), kept, pass)?;
        let mid = self.mid(x, &output, pass)?;
        let (y, mlp_state) = self.mlp.forward(self.mlp_branch.input(&mid), kept.is_state(), pass)?;
        recycle_unless(mid, &output, pass);
        self.multiply(&y, pass)?;
        Ok((y, BlockOutputs { mixer: Some(output), mlp_state, mlp: None }))
    }

    fn recompute(
        &self,
        x: Tensor,
        kept: &mut impl Iterator<Item = Tensor>,
        pass: &ForwardPass<'_>,
    ) -> Result<SavedBlock, LayerError> {
        let (output, mixer) = match self.mixer.checkpoint_has_output(pass.ctx) {
            true => (kept.next().ok_or_else(|| foreign(pass))?, Vec::new()),
            false => self.mixer.recompute(self.attention_branch.input(&x), kept, pass)?,
        };
        Ok(SavedBlock { x, mixer, outputs: BlockOutputs { mixer: Some(output), ..BlockOutputs::default() } })
    }

    fn run_backward(
        &self,
        SavedBlock { x, mixer, outputs }: SavedBlock,
        dy: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let forward = &pass.forward;
        let output = outputs.mixer.ok_or_else(|| foreign(forward))?;
        self.multiply(&dy, forward)?;
        let mid = self.mid(&x, &output, forward)?;
        self.mlp.backward(self.mlp_branch.input(&mid), outputs.mlp_state, &dy, pass)?;
        recycle_unless(mid, &output, forward);
        let mut output = Some(output);
        let take = || output.take().ok_or_else(|| foreign(forward));
        let doutput = self.attention_branch.backward_join(take, &dy, pass)?;
        forward.recycle(output);
        let gradients = BranchGradients { dy: &doutput, dx: &dy };
        self.mixer.backward(self.attention_branch.input(&x), mixer, gradients, pass)?;
        recycle_unless(doutput, &dy, forward);
        Ok(dy)
    }
}
