//! The decoder block.

mod parallel;
mod tensor_parallel;

pub use parallel::ParallelDecoderLayer;

use crate::families::ModelConfig;
use crate::nn::{
    AttentionExtent, AttentionProjections, BackwardPass, Branch, BranchNorms, ForwardPass, GatedMlp, Init,
    Layer, LayerContext, LayerError, MixerSaved, MlpProjections, MlpSaved, Parameter, ParameterList,
    ParameterSpec, Saved, Saves, TensorRank, TokenMixer, WeightLayout, WeightSpec, recycle_unless,
};
use candle_core::Tensor;
use tensor_parallel::TensorParallelDecoder;
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
    mlp: GatedMlp,
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
    ) -> (TokenMixer, GatedMlp) {
        let Self { attention, mlp, weights: layout, activation, .. } = self;
        let ModelConfig { hidden_size: hidden, intermediate_size, initializer_range: std, .. } = *config;
        // The two projections that write to the residual stream start smaller, by the square root of their number
        // (GPT-2, section 2.3), so that the variance does not grow with depth.
        let residual = std / (2.0 * config.num_layers() as f64).sqrt();
        let weights = [std, residual].map(|std| WeightSpec { init: Init::Normal { std }, layout });
        let mixer = (config.layers[index], config.norm());
        let mixer = TokenMixer::new(parameters, attention, hidden, mixer, weights);
        let mlp = GatedMlp::new(parameters, mlp, activation, [hidden, intermediate_size], weights);
        (mixer, mlp)
    }

    /// Adds the norms of queries and keys, then the biases of the modules, if there are any.
    fn add_norms_and_biases(
        self,
        config: &ModelConfig,
        (mixer, mlp): (&mut TokenMixer, &mut GatedMlp),
        parameters: &mut ParameterList,
    ) {
        mixer.add_norms_and_biases(parameters, self.attention, config.norm());
        if config.mlp_bias {
            mlp.add_biases(parameters, self.mlp);
        }
    }
}

/// State saved for the backward pass.
struct SavedDecoder {
    x: Tensor,
    attention: Vec<MixerSaved>,
    /// The attention's output, with `x` if nothing is between them: `mid` follows from both.
    attention_output: Tensor,
    mlp: Option<MlpSaved>,
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
        parts.add_norms_and_biases(config, (&mut mixer, &mut mlp), &mut parameters);
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

    /// The layer from the attention's output.
    fn forward_mlp(
        &self,
        x: &Tensor,
        attention_output: &Tensor,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<MlpSaved>), LayerError> {
        let mid = self.mid(x, attention_output, pass)?;
        let (y, saved) = self.mlp.forward(&self.mlp_branch, &mid, keep, pass)?;
        recycle_unless(mid, attention_output, pass);
        self.multiply(&y, pass)?;
        Ok((y, saved))
    }

    /// Multiplies the result of the layer, or its gradient, by the constant factor, if there is one.
    fn multiply(&self, y: &Tensor, pass: &ForwardPass<'_>) -> Result<(), LayerError> {
        match self.scalar {
            Some(scalar) => Ok(elementwise::scale_by(y, &pass[scalar])?),
            None => Ok(()),
        }
    }

    /// Returns whether a checkpoint has the attention's output.
    fn keeps_attention_output(&self, ctx: &LayerContext) -> bool {
        ctx.tiling().head_chunks > 1 && self.mixer.recomputes_chunks(ctx)
    }

    fn foreign(&self) -> LayerError {
        LayerError::ForeignSavedState { layer: self.parameters.layer().to_owned() }
    }

    /// Turns the gradient of the result into that of the input. What is not saved is recomputed.
    fn backward_saved(
        &self,
        SavedDecoder { x, attention, attention_output: output, mlp }: SavedDecoder,
        dy: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let forward = &pass.forward;
        self.multiply(&dy, forward)?;
        let mid = self.mid(&x, &output, forward)?;
        self.mlp.backward(&self.mlp_branch, &mid, mlp, &dy, pass)?;
        recycle_unless(mid, &output, forward);
        let mut output = Some(output);
        let take = || output.take().ok_or_else(|| self.foreign());
        let doutput = self.attention_branch.backward_join(take, &dy, pass)?;
        forward.recycle(output);
        self.mixer.backward(&self.attention_branch, &x, attention, (&doutput, &dy), pass)?;
        recycle_unless(doutput, &dy, forward);
        Ok(dy)
    }
}

impl Layer for DecoderLayer {
    fn name(&self) -> &str {
        self.parameters.layer()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        self.parameters.specs()
    }

    fn tensor_parallel(self: Box<Self>, tp: TensorRank) -> Result<Box<dyn Layer>, LayerError> {
        Ok(Box::new(TensorParallelDecoder::new(*self, tp)?))
    }

    fn attention_extent(&self) -> Option<AttentionExtent> {
        self.mixer.extent()
    }

    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError> {
        let pass = self.parameters.forward(params, ctx)?;
        let mut attention = Vec::new();
        let keep = |saved| attention.push(saved);
        let attention_output = self.mixer.forward(&self.attention_branch, x, Saves::Whole, keep, &pass)?;
        let (y, mlp) = self.forward_mlp(x, &attention_output, true, &pass)?;
        let saved = SavedDecoder { x: x.clone(), attention, attention_output, mlp };
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
        self.backward_saved(saved, dy, &self.parameters.backward(params, grads, ctx)?)
    }

    /// The checkpoint is the input and what the mixer appends. If an attention is recomputed in head chunks, it also contains the
    /// attention's output, so that each chunk is recomputed once and not twice.
    fn forward_checkpointed(
        &self,
        params: &[Tensor],
        x: Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Vec<Tensor>), LayerError> {
        let pass = self.parameters.forward(params, ctx)?;
        let mut kept = Vec::new();
        let output = self.mixer.forward_checkpointed(&self.attention_branch, &x, &mut kept, &pass)?;
        let (y, _) = self.forward_mlp(&x, &output, false, &pass)?;
        match self.keeps_attention_output(ctx) {
            true => kept.push(output),
            false => pass.recycle([output]),
        }
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
        let pass = self.parameters.backward(params, grads, ctx)?;
        let mut checkpoint = checkpoint.into_iter();
        let x = checkpoint.next().ok_or_else(|| self.foreign())?;
        let (attention_output, attention) = match self.keeps_attention_output(ctx) {
            true => (checkpoint.next().ok_or_else(|| self.foreign())?, Vec::new()),
            false => self.mixer.recompute(&self.attention_branch, &x, &mut checkpoint, &pass.forward)?,
        };
        self.backward_saved(SavedDecoder { x, attention, attention_output, mlp: None }, dy, &pass)
    }
}

impl SavedDecoder {
    fn bytes(&self) -> usize {
        let own: usize =
            [&self.x, &self.attention_output].into_iter().map(ulysses_kernels::tensor::bytes).sum();
        let mlp = self.mlp.as_ref().map_or(0, MlpSaved::bytes);
        own + mlp + self.attention.iter().map(MixerSaved::bytes).sum::<usize>()
    }
}
