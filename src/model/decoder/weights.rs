//! The parameters of the decoder block, and views of them by name.

use crate::model::{Init, LlamaConfig, ModelError, ParameterSpec};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::linear;

/// The parameters of the layer called `layer`, in the order of [`Weights::of`]: those of every family, then
/// those of `config.architecture`.
pub(super) fn parameters(config: &LlamaConfig, layer: &str) -> Vec<ParameterSpec> {
    let d = config.hidden_size;
    let (q, kv) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let f = config.intermediate_size;
    let normal = Init::Normal { std: config.initializer_range };
    // The two projections that write to the residual stream start smaller, by the square root of their number
    // (GPT-2, section 2.3), so that the variance does not grow with depth.
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

/// A view of a parameter; or of its gradient, unless the parameter is frozen.
pub(crate) trait View: Copy {
    /// Type of a range of rows.
    type Rows;

    /// Rows `range`, sharing the storage.
    fn rows(self, range: &Range<usize>) -> Result<Self::Rows, ModelError>;
}

impl View for &Tensor {
    type Rows = Tensor;

    fn rows(self, range: &Range<usize>) -> Result<Tensor, ModelError> {
        Ok(self.narrow(0, range.start, range.len())?)
    }
}

impl View for Option<&Tensor> {
    type Rows = Option<Tensor>;

    fn rows(self, range: &Range<usize>) -> Result<Option<Tensor>, ModelError> {
        self.map(|gradient| gradient.rows(range)).transpose()
    }
}

/// The projection to heads of [`Weights`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadWeights<T> {
    /// `[heads · head_dim, hidden]`
    pub(crate) weight: T,
    /// `[heads · head_dim]`
    pub(crate) bias: Option<T>,
    /// `[head_dim]`
    pub(super) norm: Option<T>,
}

/// The rows of [`HeadWeights`] for some heads.
pub(super) struct HeadRows<T> {
    /// `[heads · head_dim, hidden]`
    pub(super) weight: T,
    /// `[heads · head_dim]`
    pub(super) bias: Option<T>,
}

impl<T: View> HeadWeights<T> {
    /// The rows for the given heads.
    pub(super) fn heads(
        self,
        heads: &Range<usize>,
        head_dim: usize,
    ) -> Result<HeadRows<T::Rows>, ModelError> {
        let range = heads.start * head_dim..heads.end * head_dim;
        let bias = self.bias.map(|bias| bias.rows(&range)).transpose()?;
        Ok(HeadRows { weight: self.weight.rows(&range)?, bias })
    }
}

/// Values per parameter, by name: views of the parameters or of their gradients, for example. A frozen
/// parameter has no gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weights<T> {
    pub(crate) q: HeadWeights<T>,
    pub(crate) k: HeadWeights<T>,
    pub(crate) v: HeadWeights<T>,
    pub(crate) o: T,
    pub(crate) gate: T,
    pub(crate) up: T,
    pub(crate) down: T,
    pub(super) input_norm: T,
    pub(super) post_attention_norm: T,
}

impl<T: Copy> Weights<T> {
    /// Names the views that the engine passes in the order of [`parameters`], `expected` in number.
    pub(crate) fn of(
        views: &[T],
        config: &LlamaConfig,
        layer: &str,
        expected: usize,
    ) -> Result<Self, ModelError> {
        let wrong = || ModelError::ParameterCount { layer: layer.to_owned(), expected, got: views.len() };
        let &[q, k, v, o, gate, up, down, input_norm, post_attention_norm, ref added @ ..] = views else {
            return Err(wrong());
        };
        let (biases, added) = match (config.architecture.has_qkv_bias(), added) {
            (false, _) => ([None; 3], added),
            (true, &[q, k, v, ref added @ ..]) => ([Some(q), Some(k), Some(v)], added),
            (true, _) => return Err(wrong()),
        };
        let (norms, added) = match (config.architecture.has_qk_norm(), added) {
            (false, _) => ([None; 2], added),
            (true, &[q, k, ref added @ ..]) => ([Some(q), Some(k)], added),
            (true, _) => return Err(wrong()),
        };
        if !added.is_empty() {
            return Err(wrong());
        }
        Ok(Self {
            q: HeadWeights { weight: q, bias: biases[0], norm: norms[0] },
            k: HeadWeights { weight: k, bias: biases[1], norm: norms[1] },
            v: HeadWeights { weight: v, bias: biases[2], norm: None },
            o,
            gate,
            up,
            down,
            input_norm,
            post_attention_norm,
        })
    }
}

/// Adds to the gradient of a linear layer's weight, unless it is frozen: `dweight += dyᵀ·x`.
pub(super) fn add_weight_gradient(
    dy: &Tensor,
    x: &Tensor,
    dweight: Option<&Tensor>,
) -> Result<(), ModelError> {
    match dweight {
        Some(dweight) => Ok(linear::backward_weight(dy, x, dweight)?),
        None => Ok(()),
    }
}
