//! The parameters of the decoder block: which there are, and views of them by name.

use super::{Init, LlamaConfig, ModelError, ParameterSpec};
use candle_core::Tensor;
use std::ops::Range;

/// The parameters of the layer called `layer`, in the order of [`Weights::of`]: those of every
/// family, then what `config.architecture` adds.
pub(super) fn parameters(config: &LlamaConfig, layer: &str) -> Vec<ParameterSpec> {
    let d = config.hidden_size;
    let (q, kv) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let f = config.intermediate_size;
    let normal = Init::Normal { std: config.initializer_range };
    // The two projections that write to the residual stream start smaller by the square
    // root of how many there are (GPT-2, section 2.3), so its variance does not grow with depth.
    let residual = Init::Normal { std: config.initializer_range / (2.0 * config.num_layers as f64).sqrt() };
    let spec =
        |suffix: &str, shape: &[usize], init| ParameterSpec::new(format!("{layer}.{suffix}"), shape, init);
    let mut parameters = vec![
        spec("self_attn.q_proj.weight", &[q, d], normal),
        spec("self_attn.k_proj.weight", &[kv, d], normal),
        spec("self_attn.v_proj.weight", &[kv, d], normal),
        spec("self_attn.o_proj.weight", &[d, q], residual),
        spec("mlp.gate_proj.weight", &[f, d], normal),
        spec("mlp.up_proj.weight", &[f, d], normal),
        spec("mlp.down_proj.weight", &[d, f], residual),
        spec("input_layernorm.weight", &[d], Init::Ones),
        spec("post_attention_layernorm.weight", &[d], Init::Ones),
    ];
    if config.architecture.has_qkv_bias() {
        let sizes = [("q", q), ("k", kv), ("v", kv)];
        parameters.extend(
            sizes.map(|(part, size)| spec(&format!("self_attn.{part}_proj.bias"), &[size], Init::Zeros)),
        );
    }
    if config.architecture.has_qk_norm() {
        parameters.extend(
            ["q", "k"]
                .map(|part| spec(&format!("self_attn.{part}_norm.weight"), &[config.head_dim], Init::Ones)),
        );
    }
    parameters
}

/// A projection to heads. Of parameters or of their gradients, as all of [`Weights`].
pub(super) struct HeadWeights {
    /// `[heads · head_dim, hidden]`
    pub(super) weight: Tensor,
    /// `[heads · head_dim]`
    pub(super) bias: Option<Tensor>,
    /// `[head_dim]`
    pub(super) norm: Option<Tensor>,
}

impl HeadWeights {
    /// The part of some heads: the same storage.
    pub(super) fn heads(&self, heads: &Range<usize>, head_dim: usize) -> Result<Self, ModelError> {
        let rows = |tensor: &Tensor| tensor.narrow(0, heads.start * head_dim, heads.len() * head_dim);
        let bias = self.bias.as_ref().map(rows).transpose()?;
        Ok(Self { weight: rows(&self.weight)?, bias, norm: self.norm.clone() })
    }
}

/// Views of the parameters or of their gradients, by name.
pub(super) struct Weights<'a> {
    pub(super) q: HeadWeights,
    pub(super) k: HeadWeights,
    pub(super) v: HeadWeights,
    pub(super) o: &'a Tensor,
    pub(super) gate: &'a Tensor,
    pub(super) up: &'a Tensor,
    pub(super) down: &'a Tensor,
    pub(super) input_norm: &'a Tensor,
    pub(super) post_attention_norm: &'a Tensor,
}

impl<'a> Weights<'a> {
    /// Names the views that the engine passes in the order of [`parameters`], `expected` of them.
    pub(super) fn of(
        views: &'a [Tensor],
        config: &LlamaConfig,
        layer: &str,
        expected: usize,
    ) -> Result<Self, ModelError> {
        let wrong = || ModelError::ParameterCount { layer: layer.to_owned(), expected, got: views.len() };
        let [q, k, v, o, gate, up, down, input_norm, post_attention_norm, added @ ..] = views else {
            return Err(wrong());
        };
        let (biases, added) = match (config.architecture.has_qkv_bias(), added) {
            (false, _) => ([None; 3], added),
            (true, [q, k, v, added @ ..]) => ([Some(q), Some(k), Some(v)], added),
            (true, _) => return Err(wrong()),
        };
        let (norms, added) = match (config.architecture.has_qk_norm(), added) {
            (false, _) => ([None; 2], added),
            (true, [q, k, added @ ..]) => ([Some(q), Some(k)], added),
            (true, _) => return Err(wrong()),
        };
        if !added.is_empty() {
            return Err(wrong());
        }
        let head = |weight: &Tensor, bias: Option<&Tensor>, norm: Option<&Tensor>| HeadWeights {
            weight: weight.clone(),
            bias: bias.cloned(),
            norm: norm.cloned(),
        };
        Ok(Self {
            q: head(q, biases[0], norms[0]),
            k: head(k, biases[1], norms[1]),
            v: head(v, biases[2], None),
            o,
            gate,
            up,
            down,
            input_norm,
            post_attention_norm,
        })
    }
}
