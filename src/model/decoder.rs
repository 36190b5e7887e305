//! The Llama decoder block, forward and backward by hand.

use super::decoder_weights::{Weights, add_weight_gradient, parameters};
use super::heads::{self, SavedHeadNorm};
use super::{Layer, LayerContext, LlamaConfig, ModelError, ParameterSpec, Saved};
use crate::ops::attention::{Geometry, SavedAttention};
use crate::ops::rope::Direction;
use crate::ops::{linear, reduce, rms_norm, rope, swiglu};
use candle_core::Tensor;

/// RMSNorm, attention, residual; RMSNorm, SwiGLU, residual (Llama, arXiv 2302.13971), with what
/// its [`Architecture`](super::Architecture) adds.
///
/// The backward pass recomputes the normalised inputs and the SwiGLU product, each a pass
/// over memory, instead of keeping them: 2·hidden + intermediate elements less per token.
#[derive(Debug)]
pub struct DecoderLayer {
    name: String,
    config: LlamaConfig,
    parameters: Vec<ParameterSpec>,
}

/// Kept from forward to backward. `x` is the layer's input, `mid` the input of its MLP half.
struct SavedDecoder {
    x: Tensor,
    rstd_x: Tensor,
    attention: AttentionSaved,
    mid: Tensor,
    rstd_mid: Tensor,
    gate: Tensor,
    up: Tensor,
}

/// Kept of the attention, by the attention itself and of what is before and after it.
struct AttentionSaved {
    inner: SavedAttention,
    out: Tensor,
    q_norm: Option<SavedHeadNorm>,
    k_norm: Option<SavedHeadNorm>,
}

impl DecoderLayer {
    /// Layer number `index` of a model.
    pub fn new(config: &LlamaConfig, index: usize) -> Self {
        let name = format!("model.layers.{index}");
        let parameters = parameters(config, &name);
        Self { name, config: config.clone(), parameters }
    }

    /// `x` normalised, with the reciprocal root mean square of every token.
    fn normalise(
        &self,
        x: &Tensor,
        weight: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Tensor), ModelError> {
        let y = ctx.workspace().take(x.dims())?;
        let rstd = ctx.workspace().take_f32((ctx.batch(), ctx.seq_len_local()))?;
        rms_norm::forward(x, weight, self.config.rms_norm_eps, &y, &rstd)?;
        Ok((y, rstd))
    }

    /// `x · weightᵀ`, shaped `[batch, seq_local, …dims]`.
    fn project(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dims: &[usize],
        ctx: &LayerContext,
    ) -> Result<Tensor, ModelError> {
        let y = ctx.workspace().take(token_dims(ctx, dims))?;
        linear::forward(x, weight, &y.flatten_from(2)?, false)?;
        Ok(y)
    }

    /// Views by name.
    fn weights<T: Copy>(&self, views: impl Iterator<Item = T>) -> Result<Weights<T>, ModelError> {
        let views: Vec<T> = views.collect();
        Weights::of(&views, &self.config, &self.name, self.parameters.len())
    }

    /// Which keys each query sees.
    fn geometry(&self, ctx: &LayerContext) -> Result<Geometry, ModelError> {
        let LlamaConfig { num_heads, num_kv_heads, architecture, .. } = self.config;
        ctx.windowed_geometry(num_heads, num_kv_heads, architecture.sliding_window())
    }

    /// Attention half: `x + o_proj(attention(norm(x)))`, and what its backward needs.
    fn attend(
        &self,
        weights: &Weights<&Tensor>,
        x: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Tensor, AttentionSaved), ModelError> {
        let LlamaConfig { head_dim, rms_norm_eps, .. } = self.config;
        let ws = ctx.workspace();
        let (normed, rstd) = self.normalise(x, weights.input_norm, ctx)?;
        let (q, q_norm) = heads::forward(&normed, weights.q, head_dim, rms_norm_eps, ctx)?;
        let (k, k_norm) = heads::forward(&normed, weights.k, head_dim, rms_norm_eps, ctx)?;
        let (v, _) = heads::forward(&normed, weights.v, head_dim, rms_norm_eps, ctx)?;
        ws.give(normed);
        let table = ctx.rope(head_dim, self.config.rope())?;
        rope::apply(&q, &table, Direction::Forward)?;
        rope::apply(&k, &table, Direction::Forward)?;
        let (out, inner) = ctx.attention().forward(q, k, v, &self.geometry(ctx)?)?;
        let mid = ws.take(x.dims())?;
        reduce::copy(&mid, x)?;
        linear::forward(&out.flatten_from(2)?, weights.o, &mid, true)?;
        Ok((mid, rstd, AttentionSaved { inner, out, q_norm, k_norm }))
    }

    /// Gradient of the MLP half. `dy` becomes the gradient of its input `mid`.
    fn backward_mlp(
        &self,
        weights: &Weights<&Tensor>,
        grads: &Weights<Option<&Tensor>>,
        saved: [Tensor; 4],
        dy: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(), ModelError> {
        let [mid, rstd, gate, up] = saved;
        let ws = ctx.workspace();
        let dims = gate.dims();
        let product = ws.take(dims)?;
        swiglu::forward(&gate, &up, &product)?;
        add_weight_gradient(dy, &product, grads.down)?;
        let dproduct = product;
        linear::backward_input(dy, weights.down, &dproduct, false)?;
        let (dgate, dup) = (ws.take(dims)?, ws.take(dims)?);
        swiglu::backward(&dproduct, &gate, &up, &dgate, &dup)?;
        [dproduct, gate, up].into_iter().for_each(|tensor| ws.give(tensor));

        let (normed, rstd_again) = self.normalise(&mid, weights.post_attention_norm, ctx)?;
        add_weight_gradient(&dgate, &normed, grads.gate)?;
        add_weight_gradient(&dup, &normed, grads.up)?;
        let dnormed = normed;
        linear::backward_input(&dgate, weights.gate, &dnormed, false)?;
        linear::backward_input(&dup, weights.up, &dnormed, true)?;
        let (weight, dweight) = (weights.post_attention_norm, grads.post_attention_norm);
        rms_norm::backward(&dnormed, &mid, weight, &rstd, dy, true, dweight)?;
        [dgate, dup, dnormed, rstd_again, rstd, mid].into_iter().for_each(|tensor| ws.give(tensor));
        Ok(())
    }

    /// Gradient of the attention half. `dmid` becomes the gradient of its input `x`.
    fn backward_attention(
        &self,
        weights: &Weights<&Tensor>,
        grads: &Weights<Option<&Tensor>>,
        (x, rstd, saved): (Tensor, Tensor, AttentionSaved),
        dmid: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(), ModelError> {
        let AttentionSaved { inner, out, q_norm, k_norm } = saved;
        let ws = ctx.workspace();
        add_weight_gradient(dmid, &out.flatten_from(2)?, grads.o)?;
        let dout = ws.take(out.dims())?;
        linear::backward_input(dmid, weights.o, &dout.flatten_from(2)?, false)?;
        let (dq, dk, dv) = ctx.attention().backward(inner, &dout, &self.geometry(ctx)?)?;
        ws.give(dout);
        ws.give(out);
        let table = ctx.rope(self.config.head_dim, self.config.rope())?;
        rope::apply(&dq, &table, Direction::Backward)?;
        rope::apply(&dk, &table, Direction::Backward)?;

        let (normed, rstd_again) = self.normalise(&x, weights.input_norm, ctx)?;
        let dq = heads::backward_weights(dq, &normed, weights.q, grads.q, q_norm, ctx)?;
        let dk = heads::backward_weights(dk, &normed, weights.k, grads.k, k_norm, ctx)?;
        let dv = heads::backward_weights(dv, &normed, weights.v, grads.v, None, ctx)?;
        let dnormed = normed;
        heads::backward_input(dq, weights.q, &dnormed, false, ctx)?;
        heads::backward_input(dk, weights.k, &dnormed, true, ctx)?;
        heads::backward_input(dv, weights.v, &dnormed, true, ctx)?;
        rms_norm::backward(&dnormed, &x, weights.input_norm, &rstd, dmid, true, grads.input_norm)?;
        [dnormed, rstd_again, rstd].into_iter().for_each(|tensor| ws.give(tensor));
        Ok(())
    }
}

impl Layer for DecoderLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), ModelError> {
        let weights = self.weights(params.iter())?;
        let ws = ctx.workspace();
        let f = self.config.intermediate_size;
        let (mid, rstd_x, attention) = self.attend(&weights, x, ctx)?;
        let (normed, rstd_mid) = self.normalise(&mid, weights.post_attention_norm, ctx)?;
        let gate = self.project(&normed, weights.gate, &[f], ctx)?;
        let up = self.project(&normed, weights.up, &[f], ctx)?;
        ws.give(normed);
        let product = ws.take(gate.dims())?;
        swiglu::forward(&gate, &up, &product)?;
        let y = ws.take(x.dims())?;
        reduce::copy(&y, &mid)?;
        linear::forward(&product, weights.down, &y, true)?;
        ws.give(product);
        let saved = SavedDecoder { x: x.clone(), rstd_x, attention, mid, rstd_mid, gate, up };
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
        let saved: SavedDecoder = saved.downcast(&self.name)?;
        let (weights, grads) =
            (self.weights(params.iter())?, self.weights(grads.iter().map(Option::as_ref))?);
        let mlp = [saved.mid, saved.rstd_mid, saved.gate, saved.up];
        self.backward_mlp(&weights, &grads, mlp, &dy, ctx)?;
        let attention = (saved.x, saved.rstd_x, saved.attention);
        self.backward_attention(&weights, &grads, attention, &dy, ctx)?;
        Ok(dy)
    }
}

impl SavedDecoder {
    fn bytes(&self) -> usize {
        let own = [&self.x, &self.rstd_x, &self.mid, &self.rstd_mid, &self.gate, &self.up];
        own.into_iter().map(crate::tensor::bytes).sum::<usize>() + self.attention.bytes()
    }
}

impl AttentionSaved {
    fn bytes(&self) -> usize {
        // Without sequence parallelism the attention keeps the very tensor that it returned.
        let shared = self.out.id() == self.inner.o.id();
        let out = if shared { 0 } else { crate::tensor::bytes(&self.out) };
        let norms = [&self.q_norm, &self.k_norm].into_iter().flatten().map(SavedHeadNorm::bytes);
        self.inner.bytes() + out + norms.sum::<usize>()
    }
}

/// `[batch, seq_local, …dims]`.
fn token_dims(ctx: &LayerContext, dims: &[usize]) -> Vec<usize> {
    [&[ctx.batch(), ctx.seq_len_local()], dims].concat()
}
