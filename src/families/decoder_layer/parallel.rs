//! The block of which attention and MLP have the same input.

mod divided;

use super::DecoderParts;
use crate::families::ModelConfig;
use crate::nn::{
    AttentionExtent, BackwardPass, Branch, ForwardPass, GatedMlp, Layer, LayerContext, LayerError,
    MixerSaved, MlpSaved, ParameterList, ParameterSpec, Saved, Saves, TensorRank, TokenMixer,
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
    mlp: GatedMlp,
    has_two_norms: bool,
}

/// State saved for the backward pass.
struct SavedParallel {
    x: Tensor,
    attention: Vec<MixerSaved>,
    mlp: Option<MlpSaved>,
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
        parts.add_norms_and_biases(config, (&mut attention, &mut mlp), &mut parameters);
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
        let (output, saved) = self.mlp.forward(&self.mlp_branch, x, keep, pass)?;
        elementwise::accumulate(y, &output)?;
        pass.recycle([output]);
        Ok(saved)
    }

    /// Turns the gradient of the result into that of the input. What is not saved is recomputed.
    fn backward_saved(
        &self,
        SavedParallel { x, attention, mlp }: SavedParallel,
        dy: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        // The gradient of the sum is that of `x`, to which both modules add theirs.
        let dx = pass.forward.workspace().alloc(dy.dims())?;
        strided_copy::copy(&dy, &dx)?;
        self.mlp.backward(&self.mlp_branch, &x, mlp, &dx, pass)?;
        self.attention.backward(&self.attention_branch, &x, attention, (&dy, &dx), pass)?;
        pass.forward.recycle([dy]);
        Ok(dx)
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
        let mlp = self.add_mlp(x, &y, true, &pass)?;
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
        let saved = saved.downcast(self.name())?;
        self.backward_saved(saved, dy, &self.parameters.backward(params, grads, ctx)?)
    }

    fn forward_checkpointed(
        &self,
        params: &[Tensor],
        x: Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Vec<Tensor>), LayerError> {
        let pass = self.parameters.forward(params, ctx)?;
        let mut kept = Vec::new();
        let y = self.attention.forward_checkpointed(&self.attention_branch, &x, &mut kept, &pass)?;
        self.add_mlp(&x, &y, false, &pass)?;
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
        let foreign = || LayerError::ForeignSavedState { layer: self.name().to_owned() };
        let x = checkpoint.next().ok_or_else(foreign)?;
        let (branch, input) = (&self.attention_branch, || Ok(x.clone()));
        let attention = self.attention.recompute_state(branch, input, &mut checkpoint, &pass.forward)?;
        self.backward_saved(SavedParallel { x, attention, mlp: None }, dy, &pass)
    }
}

impl SavedParallel {
    fn bytes(&self) -> usize {
        let attention = self.attention.iter().map(MixerSaved::bytes).sum::<usize>();
        ulysses_kernels::tensor::bytes(&self.x) + self.mlp.as_ref().map_or(0, MlpSaved::bytes) + attention
    }
}
