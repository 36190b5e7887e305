//! The Llama decoder block, with a hand-written backward pass.

use super::mlp::GateUp;
use super::saved_attention::{AttentionSaved, Saves};
use super::weights::{Weights, parameters};
use crate::model::{AttentionExtent, Layer, LayerContext, LlamaConfig, ModelError, ParameterSpec, Saved};
use candle_core::Tensor;
use ulysses_kernels::rms_norm;

/// RMSNorm, attention, residual; RMSNorm, SwiGLU, residual (Llama, arXiv 2302.13971), with the additions of
/// its [`Architecture`](crate::model::Architecture).
///
/// The backward pass recomputes the normalized inputs and the SwiGLU product, each in one pass over memory.
/// This saves 2·hidden + intermediate elements per token. [`Tiling`](crate::model::Tiling) limits memory: the MLP
/// runs in tiles of tokens, the attention in head chunks.
#[derive(Debug)]
pub struct DecoderLayer {
    pub(super) name: String,
    pub(super) config: LlamaConfig,
    parameters: Vec<ParameterSpec>,
}

/// State saved for the backward pass: `x` is the layer's input, `mid` the input of its MLP half.
struct SavedDecoder {
    x: Tensor,
    attention: Vec<AttentionSaved>,
    mid: Tensor,
    mlp: Option<GateUp>,
}

impl DecoderLayer {
    /// Creates layer `index` of a model.
    pub fn new(config: &LlamaConfig, index: usize) -> Self {
        let name = format!("model.layers.{index}");
        let parameters = parameters(config, &name);
        Self { name, config: config.clone(), parameters }
    }

    /// Applies the RMSNorm to `x` and writes every token's reciprocal root mean square to `rstd`.
    pub(super) fn normalize(
        &self,
        x: &Tensor,
        weight: &Tensor,
        rstd: &Tensor,
        ctx: &LayerContext,
    ) -> Result<Tensor, ModelError> {
        let y = ctx.workspace().alloc(x.dims())?;
        rms_norm::forward(x, weight, self.config.rms_norm_eps, &y, rstd)?;
        Ok(y)
    }

    /// Names the views.
    fn weights<T: Copy>(&self, views: impl Iterator<Item = T>) -> Result<Weights<T>, ModelError> {
        let views: Vec<T> = views.collect();
        Weights::of(&views, &self.config, &self.name, self.parameters.len())
    }
}

impl Layer for DecoderLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn attention_extent(&self) -> Option<AttentionExtent> {
        let LlamaConfig { num_heads, head_dim, architecture, .. } = self.config;
        Some(AttentionExtent { width: num_heads * head_dim, window: architecture.sliding_window() })
    }

    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), ModelError> {
        let weights = self.weights(params.iter())?;
        let mut attention = Vec::new();
        let mid = self.forward_attention(&weights, x, ctx, Saves::Whole, |saved| attention.push(saved))?;
        let (y, mlp) = self.forward_mlp(&weights, &mid, true, ctx)?;
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
    ) -> Result<Tensor, ModelError> {
        let SavedDecoder { x, attention, mid, mlp } = saved.downcast(&self.name)?;
        let (weights, grads) =
            (self.weights(params.iter())?, self.weights(grads.iter().map(Option::as_ref))?);
        self.backward_mlp(&weights, &grads, (mid, mlp), &dy, ctx)?;
        self.backward_attention((&weights, &grads), (&x, attention), &dy, ctx)?;
        Ok(dy)
    }

    /// The checkpoint is the input, and if the context says so, the attention output and lse of every head
    /// chunk. Without these, if there are head chunks, it also contains the input of the MLP half, so that the
    /// attention is recomputed once, chunk by chunk, and not twice.
    fn forward_checkpointed(
        &self,
        params: &[Tensor],
        x: Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Vec<Tensor>), ModelError> {
        let weights = self.weights(params.iter())?;
        let mut outputs = Vec::new();
        let saves_output = ctx.saves_attention_output();
        let mid =
            self.forward_attention(&weights, &x, ctx, Saves::Checkpoint, |saved| match saves_output {
                true => outputs.extend(saved.into_output(ctx)),
                false => saved.recycle(ctx),
            })?;
        let (y, _) = self.forward_mlp(&weights, &mid, false, ctx)?;
        let mut checkpoint = vec![x];
        checkpoint.append(&mut outputs);
        if !saves_output && ctx.tiling().head_chunks > 1 {
            checkpoint.push(mid);
        } else {
            ctx.workspace().recycle(mid);
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
    ) -> Result<Tensor, ModelError> {
        let (weights, grads) =
            (self.weights(params.iter())?, self.weights(grads.iter().map(Option::as_ref))?);
        let mut checkpoint = checkpoint.into_iter();
        let foreign = || ModelError::ForeignSavedState { layer: self.name.clone() };
        let x = checkpoint.next().ok_or_else(foreign)?;
        let mut attention = Vec::new();
        let mid = if ctx.saves_attention_output() {
            for _ in 0..ctx.tiling().head_chunks {
                let (out, lse) = checkpoint.next().zip(checkpoint.next()).ok_or_else(foreign)?;
                attention.push(AttentionSaved::Output { out, lse });
            }
            self.forward_projection(&weights, &x, &attention, ctx)?
        } else if let Some(mid) = checkpoint.next() {
            mid
        } else {
            self.forward_attention(&weights, &x, ctx, Saves::Whole, |saved| attention.push(saved))?
        };
        self.backward_mlp(&weights, &grads, (mid, None), &dy, ctx)?;
        self.backward_attention((&weights, &grads), (&x, attention), &dy, ctx)?;
        Ok(dy)
    }
}

impl SavedDecoder {
    fn bytes(&self) -> usize {
        let mlp = self.mlp.iter().flat_map(|GateUp { gate, up }| [gate, up]);
        let own: usize =
            [&self.x, &self.mid].into_iter().chain(mlp).map(ulysses_kernels::tensor::bytes).sum();
        own + self.attention.iter().map(AttentionSaved::bytes).sum::<usize>()
    }
}
