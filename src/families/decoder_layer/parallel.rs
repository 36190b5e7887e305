//! The block of which attention and MLP have the same input.

mod divided;

use crate::families::ModelConfig;
use crate::nn::{
    AttentionExtent, Branch, BranchNorms, GatedMlp, Init, Layer, LayerContext, LayerError, MixerSaved,
    MlpSaved, ParameterList, ParameterSpec, Saved, Saves, TensorRank, TokenMixer,
};
use candle_core::Tensor;
use divided::DividedParallelDecoder;
use ulysses_kernels::glu::Activation;
use ulysses_kernels::{elementwise, strided_copy};

/// `y = x + attention(norm(x)) + mlp(norm(x))` with one norm (GPT-J, Cohere), and SwiGLU.
#[derive(Debug)]
pub struct ParallelDecoderLayer {
    parameters: ParameterList,
    attention_branch: Branch,
    attention: TokenMixer,
    /// Behind the norm of the attention.
    mlp_branch: Branch,
    mlp: GatedMlp,
}

/// State saved for the backward pass.
struct SavedParallel {
    x: Tensor,
    attention: Vec<MixerSaved>,
    mlp: Option<MlpSaved>,
}

impl ParallelDecoderLayer {
    /// Creates layer `index` of a model.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn new(config: &ModelConfig, index: usize) -> Self {
        let ModelConfig { hidden_size: hidden, intermediate_size, initializer_range: std, .. } = *config;
        let normal = Init::Normal { std };
        // As in `DecoderLayer`.
        let residual = Init::Normal { std: std / (2.0 * config.num_layers() as f64).sqrt() };
        let mut parameters = ParameterList::new(format!("model.layers.{index}"));
        let mixer = (config.layers[index], config.norm());
        let attention = TokenMixer::new(&mut parameters, false, hidden, mixer, [normal, residual]);
        let sizes = [hidden, intermediate_size];
        let mlp = GatedMlp::new(&mut parameters, false, Activation::Silu, sizes, [normal, residual]);
        let names = BranchNorms { before: Some("input_layernorm"), after: None };
        let attention_branch = Branch::new(&mut parameters, names, hidden, config.norm(), 1.0);
        let mlp_branch = attention_branch.module_beside();
        Self { parameters, attention_branch, attention, mlp_branch, mlp }
    }
}

impl Layer for ParallelDecoderLayer {
    fn name(&self) -> &str {
        self.parameters.layer()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        self.parameters.specs()
    }

    fn tensor_parallel(self: Box<Self>, tp: TensorRank) -> Result<Box<dyn Layer>, LayerError> {
        Ok(Box::new(DividedParallelDecoder::new(*self, tp)?))
    }

    fn attention_extent(&self) -> Option<AttentionExtent> {
        self.attention.extent()
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
        let y = self.attention.forward(&self.attention_branch, x, Saves::Whole, keep, &pass)?;
        let (output, mlp) = self.mlp.forward(&self.mlp_branch, x, true, &pass)?;
        elementwise::accumulate(&y, &output)?;
        pass.recycle([output]);
        let saved = SavedParallel { x: x.clone(), attention, mlp };
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
        let SavedParallel { x, attention, mlp } = saved.downcast(self.name())?;
        let pass = self.parameters.backward(params, grads, ctx)?;
        // The gradient of the sum is that of `x`, to which both modules add theirs.
        let dx = ctx.workspace().alloc(dy.dims())?;
        strided_copy::copy(&dy, &dx)?;
        self.mlp.backward(&self.mlp_branch, &x, mlp, &dx, &pass)?;
        self.attention.backward(&self.attention_branch, &x, attention, (&dy, &dx), &pass)?;
        pass.forward.recycle([dy]);
        Ok(dx)
    }
}

impl SavedParallel {
    fn bytes(&self) -> usize {
        let attention = self.attention.iter().map(MixerSaved::bytes).sum::<usize>();
        ulysses_kernels::tensor::bytes(&self.x) + self.mlp.as_ref().map_or(0, MlpSaved::bytes) + attention
    }
}
