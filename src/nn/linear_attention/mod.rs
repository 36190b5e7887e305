//! Linear attention: Gated DeltaNet (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.
//!
//! ```text
//! q, k, v = silu(conv(in_proj_qkv(x)))        causal, within documents
//! g = -exp(A_log) · softplus(in_proj_a(x) + dt_bias),  beta = σ(in_proj_b(x))
//! o = gated_delta(q, k, v, g, beta)
//! y = out_proj(norm(o) · silu(in_proj_z(x)))  the norm is that of each head
//! ```
//!
//! Convolution and state see whole sequences: before them tokens are [exchanged for heads](super::HeadExchange), after them
//! heads for tokens. A rank computes the gradients of its own heads' parts of the convolution, `A_log` and `dt_bias`; the sum
//! over the sequence's ranks is the whole. Ranks of tp divide the heads first.

mod backward;
mod divide;
mod forward;
mod heads;
mod saved;

pub use saved::LinearAttentionSaved;

use super::causal_conv::CausalConv;
use super::{
    ForwardPass, Gathered, GroupNames, GroupedHeads, HeadKind, Init, LayerError, Linear, NormConfig,
    Parameter, ParameterList, RmsNorm,
};
use candle_core::Tensor;
use std::ops::Range;

/// The heads of a layer's linear attention, and its convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearAttentionConfig {
    /// Key heads; queries have as many.
    pub num_key_heads: usize,
    /// Value heads; a multiple of the key heads.
    pub num_value_heads: usize,
    /// Elements per key head.
    pub key_head_dim: usize,
    /// Elements per value head.
    pub value_head_dim: usize,
    /// Tokens that the convolution reads, including the current one.
    pub conv_width: usize,
}

impl LinearAttentionConfig {
    /// The heads.
    pub fn heads(&self) -> GroupedHeads {
        GroupedHeads { num_key_heads: self.num_key_heads, num_value_heads: self.num_value_heads }
    }

    /// Elements of all keys, of all queries.
    pub fn key_dim(&self) -> usize {
        self.num_key_heads * self.key_head_dim
    }

    /// Elements of all values.
    pub fn value_dim(&self) -> usize {
        self.num_value_heads * self.value_head_dim
    }
}

/// The heads of the tensors that are exchanged: queries, keys, values, projections for rate and decay.
const EXCHANGED: [HeadKind; 5] =
    [HeadKind::Key, HeadKind::Key, HeadKind::Value, HeadKind::Value, HeadKind::Value];

/// The bounds of exp(A_log) at first, as in transformers.
const DECAYS: [f64; 2] = [0.01, 16.0];

/// Gated DeltaNet, without the branch that it is in.
#[derive(Debug)]
pub struct LinearAttention {
    shape: LinearAttentionConfig,
    /// Queries, keys, values, projections for rate and decay: the tensors that are exchanged.
    mixed: [Linear; 5],
    z: Linear,
    out: Linear,
    /// Of queries, keys, values.
    conv: CausalConv,
    /// The channels of each of them.
    channels: [Range<usize>; 3],
    dt_bias: Parameter,
    a_log: Parameter,
    norm: RmsNorm,
}

impl LinearAttention {
    /// Adds the parameters under `linear_attn`, with initial values `init`, those of `out_proj` with `out_init`.
    pub fn new(
        parameters: &mut ParameterList,
        hidden_size: usize,
        shape: LinearAttentionConfig,
        eps: f64,
        [init, out_init]: [Init; 2],
    ) -> Self {
        let LinearAttentionConfig { num_value_heads, value_head_dim, conv_width, .. } = shape;
        let (key_dim, value_dim) = (shape.key_dim(), shape.value_dim());
        let qkv = GroupNames::One("linear_attn.in_proj_qkv");
        let [q, k, v] = Linear::group(parameters, qkv, [key_dim, key_dim, value_dim], hidden_size, init);
        let mut linear = |name: &str, out| Linear::new(parameters, name, [out, hidden_size], init);
        let z = linear("linear_attn.in_proj_z", value_dim);
        let b = linear("linear_attn.in_proj_b", num_value_heads);
        let a = linear("linear_attn.in_proj_a", num_value_heads);
        let out = Linear::new(parameters, "linear_attn.out_proj", [hidden_size, value_dim], out_init);
        let num_channels = 2 * key_dim + value_dim;
        let channels = [0..key_dim, key_dim..2 * key_dim, 2 * key_dim..num_channels];
        let conv = CausalConv::new(parameters, "linear_attn.conv1d", [num_channels, conv_width], init, true);
        let dt_bias = parameters.add("linear_attn.dt_bias", [num_value_heads], Init::Ones);
        let a_log =
            parameters.add("linear_attn.A_log", [num_value_heads], Init::LogUniform { bounds: DECAYS });
        let norm = RmsNorm::new(parameters, "linear_attn.norm", value_head_dim, NormConfig::from(eps));
        Self { shape, mixed: [q, k, v, b, a], z, out, conv, channels, dt_bias, a_log, norm }
    }

    /// Exchanges tensors, of which each has heads of a kind.
    fn exchange<const N: usize>(
        &self,
        tensors: [Tensor; N],
        kinds: [HeadKind; N],
        direction: (Gathered, bool),
        pass: &ForwardPass<'_>,
    ) -> Result<[Tensor; N], LayerError> {
        pass.ctx.exchange_heads(tensors, kinds, self.shape.heads(), direction)
    }
}
