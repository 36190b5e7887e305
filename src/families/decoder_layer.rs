//! The Llama decoder block.

use crate::families::ModelConfig;
use crate::nn::{
    AttentionExtent, AttentionSaved, BackwardPass, ForwardPass, GateUp, GatedMlp, Init, Layer, LayerContext,
    LayerError, ParameterList, ParameterSpec, RmsNorm, Saved, Saves, SelfAttention,
};
use candle_core::Tensor;

/// RMSNorm, attention, residual; RMSNorm, SwiGLU, residual (Llama, arXiv 2302.13971). Families with the same order of
/// modules add their parts to it.
///
/// ```text
/// mid = x + attention(input_norm(x))
/// y = mid + mlp(post_attention_norm(mid))
/// ```
///
/// [`Tiling`](crate::nn::Tiling) limits memory: the MLP runs in tiles of tokens, the attention in head chunks.
#[derive(Debug)]
pub struct DecoderLayer {
    parameters: ParameterList,
    input_norm: RmsNorm,
    attention: SelfAttention,
    post_attention_norm: RmsNorm,
    mlp: GatedMlp,
}

/// State saved for the backward pass.
struct SavedDecoder {
    x: Tensor,
    attention: Vec<AttentionSaved>,
    mid: Tensor,
    mlp: Option<GateUp>,
}

impl DecoderLayer {
    /// Creates layer `index` of a model.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn new(config: &ModelConfig, index: usize) -> Self {
        let ModelConfig { hidden_size, intermediate_size, rms_norm_eps: eps, initializer_range: std, .. } =
            *config;
        let normal = Init::Normal { std };
        // The two projections that write to the residual stream start smaller, by the square root of their number
        // (GPT-2, section 2.3), so that the variance does not grow with depth.
        let residual = Init::Normal { std: std / (2.0 * config.num_layers() as f64).sqrt() };
        // Partitions and checkpoints depend on this order.
        let mut parameters = ParameterList::new(format!("model.layers.{index}"));
        let attention =
            SelfAttention::new(&mut parameters, hidden_size, config.layers[index], normal, residual);
        let mlp = GatedMlp::new(&mut parameters, hidden_size, intermediate_size, normal, residual);
        let [input_norm, post_attention_norm] = ["input_layernorm", "post_attention_layernorm"]
            .map(|name| RmsNorm::new(&mut parameters, name, hidden_size, eps));
        Self { parameters, input_norm, attention, post_attention_norm, mlp }
    }

    /// Adds biases to the projections of queries, keys and values.
    #[must_use]
    pub fn with_qkv_bias(mut self) -> Self {
        self.attention.add_qkv_bias(&mut self.parameters);
        self
    }

    /// Adds norms over every head of the queries and of the keys, before the rotary embedding.
    #[must_use]
    pub fn with_qk_norm(mut self, eps: f64) -> Self {
        self.attention.add_qk_norm(&mut self.parameters, eps);
        self
    }

    /// The input of the MLP. Passes the state of every head chunk to `keep`.
    fn attend(
        &self,
        x: &Tensor,
        saves: Saves,
        keep: impl FnMut(AttentionSaved),
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        self.attention.forward(&self.input_norm, x, saves, keep, pass)
    }

    /// Turns the gradient of the result into that of the input. What is not saved is recomputed.
    fn backward_saved(
        &self,
        SavedDecoder { x, attention, mid, mlp }: SavedDecoder,
        dy: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        self.mlp.backward(&self.post_attention_norm, &mid, mlp, &dy, pass)?;
        pass.forward.recycle([mid]);
        self.attention.backward(&self.input_norm, &x, attention, &dy, pass)?;
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

    fn attention_extent(&self) -> Option<AttentionExtent> {
        Some(self.attention.extent())
    }

    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError> {
        let pass = self.parameters.forward(params, ctx)?;
        let mut attention = Vec::new();
        let mid = self.attend(x, Saves::Whole, |saved| attention.push(saved), &pass)?;
        let (y, mlp) = self.mlp.forward(&self.post_attention_norm, &mid, true, &pass)?;
        let saved = SavedDecoder { x: x.clone(), attention, mid, mlp };
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

    /// The checkpoint is the input, and if the context says so, the attention output and lse of every head
    /// chunk. Without these, if there are head chunks, it also contains the input of the MLP half, so that the
    /// attention is recomputed once, chunk by chunk, and not twice.
    fn forward_checkpointed(
        &self,
        params: &[Tensor],
        x: Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Vec<Tensor>), LayerError> {
        let pass = self.parameters.forward(params, ctx)?;
        let mut outputs = Vec::new();
        let saves_output = ctx.saves_attention_output();
        let keep = |saved: AttentionSaved| match saves_output {
            true => outputs.extend(saved.into_checkpoint(&pass)),
            false => saved.recycle(&pass),
        };
        let mid = self.attend(&x, Saves::Checkpoint, keep, &pass)?;
        let (y, _) = self.mlp.forward(&self.post_attention_norm, &mid, false, &pass)?;
        let mut checkpoint = vec![x];
        checkpoint.append(&mut outputs);
        if !saves_output && ctx.tiling().head_chunks > 1 {
            checkpoint.push(mid);
        } else {
            pass.recycle([mid]);
        }
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
        let pass = self.parameters.backward(params, grads, ctx)?;
        let mut checkpoint = checkpoint.into_iter();
        let foreign = || LayerError::ForeignSavedState { layer: self.name().to_owned() };
        let x = checkpoint.next().ok_or_else(foreign)?;
        let mut attention = Vec::new();
        let mid = if ctx.saves_attention_output() {
            for _ in 0..ctx.tiling().head_chunks {
                let (out, lse) = checkpoint.next().zip(checkpoint.next()).ok_or_else(foreign)?;
                attention.push(AttentionSaved::from_checkpoint([out, lse]));
            }
            self.attention.forward_from_outputs(&x, &attention, &pass.forward)?
        } else if let Some(mid) = checkpoint.next() {
            mid
        } else {
            self.attend(&x, Saves::Whole, |saved| attention.push(saved), &pass.forward)?
        };
        self.backward_saved(SavedDecoder { x, attention, mid, mlp: None }, dy, &pass)
    }
}

impl SavedDecoder {
    fn bytes(&self) -> usize {
        let own: usize = [&self.x, &self.mid].into_iter().map(ulysses_kernels::tensor::bytes).sum();
        let mlp = self.mlp.as_ref().map_or(0, GateUp::bytes);
        own + mlp + self.attention.iter().map(AttentionSaved::bytes).sum::<usize>()
    }
}
