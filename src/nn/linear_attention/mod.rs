//! Linear attention: a state per head that decays, of keys and values.
//!
//! Gated DeltaNet (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5:
//!
//! ```text
//! q, k, v = silu(conv(in_proj_qkv(x)))        causal, within documents
//! g = -exp(A_log) · softplus(in_proj_a(x) + dt_bias),  beta = σ(in_proj_b(x))
//! o = gated_delta(q, k, v, g, beta)
//! y = out_proj(norm(o) · silu(in_proj_z(x)))  the norm is that of each head
//! ```
//!
//! Mamba 2 (arXiv 2405.21060), as in Granite 4 and Nemotron-H, where C is called q, B k, and x v:
//!
//! ```text
//! z, (v, k, q), a = in_proj(x)
//! q, k, v = silu(conv(q, k, v))
//! dt = clamp(softplus(a + dt_bias)),  g = -exp(A_log) · dt
//! o = sums(q, k, v, g, dt) + D · v
//! y = out_proj(norm(o · silu(z)))             the norm is that of each group of heads with the same k and q
//! ```
//!
//! Convolution and state see whole sequences: before them tokens are [exchanged for heads](super::HeadExchange), after them
//! heads for tokens. A rank computes the gradients of its own heads' parts of the convolution, `A_log`, `dt_bias` and `D`; the sum
//! over the sequence's ranks is the whole. Ranks of tp divide the heads first. Or each rank computes all heads for its tokens, and
//! [states are passed on](passed).

mod backward;
mod config;
mod divide;
mod forward;
mod gated_norm;
mod heads;
mod mixed;
mod passed;
mod saved;

pub use config::{LinearAttentionConfig, LinearAttentionKind, Mamba2Config};
pub use saved::LinearAttentionSaved;

use super::causal_conv::CausalConv;
use super::{
    ForwardPass, Gathered, GroupNames, Init, LayerError, Linear, Norm, NormConfig, Parameter, ParameterList,
};
use candle_core::Tensor;
use gated_norm::GatedNorm;
use mixed::Mixed;
use std::ops::Range;

/// The bounds of exp(A_log) at first, as in transformers.
const DECAYS: [f64; 2] = [0.01, 16.0];

/// Those of Mamba 2, as in its authors' code.
const MAMBA_DECAYS: [f64; 2] = [1.0, 16.0];

/// A linear attention, without the branch that it is in.
#[derive(Debug)]
pub struct LinearAttention {
    shape: LinearAttentionConfig,
    mixed: Mixed<Linear>,
    z: Linear,
    out: Linear,
    /// Of queries, keys, values.
    conv: CausalConv,
    /// The channels of each of them.
    channels: [Range<usize>; 3],
    dt_bias: Parameter,
    a_log: Parameter,
    /// D of Mamba 2: the skip connection of each head.
    skip: Option<Parameter>,
    norm: GatedNorm,
}

impl LinearAttention {
    /// Adds the parameters under `linear_attn`, or the name `mamba` for Mamba 2, with initial values `init`, those of `out_proj` with
    /// `out_init`.
    pub fn new(
        parameters: &mut ParameterList,
        mamba: &str,
        hidden_size: usize,
        shape: LinearAttentionConfig,
        eps: f64,
        inits: [Init; 2],
    ) -> Self {
        match shape.kind {
            LinearAttentionKind::GatedDeltaNet => {
                Self::gated_delta_net(parameters, hidden_size, shape, eps, inits)
            }
            LinearAttentionKind::Mamba2(options) => {
                Self::mamba2(parameters, mamba, hidden_size, (shape, options), eps, inits)
            }
        }
    }

    fn gated_delta_net(
        parameters: &mut ParameterList,
        hidden_size: usize,
        shape: LinearAttentionConfig,
        eps: f64,
        [init, out_init]: [Init; 2],
    ) -> Self {
        let LinearAttentionConfig { num_value_heads, value_head_dim, conv_width, .. } = shape;
        let (key_dim, value_dim) = (shape.key_dim(), shape.value_dim());
        let names = GroupNames::One("linear_attn.in_proj_qkv");
        let qkv = Linear::group(parameters, names, [key_dim, key_dim, value_dim], hidden_size, init);
        let mut linear = |name: &str, out| Linear::new(parameters, name, [out, hidden_size], init);
        let z = linear("linear_attn.in_proj_z", value_dim);
        let b = Some(linear("linear_attn.in_proj_b", num_value_heads));
        let a = linear("linear_attn.in_proj_a", num_value_heads);
        let out = Linear::new(parameters, "linear_attn.out_proj", [hidden_size, value_dim], out_init);
        let num_channels = 2 * key_dim + value_dim;
        let channels = [0..key_dim, key_dim..2 * key_dim, 2 * key_dim..num_channels];
        let conv = CausalConv::new(parameters, "linear_attn.conv1d", [num_channels, conv_width], init, true);
        let dt_bias = parameters.add("linear_attn.dt_bias", [num_value_heads], Init::Ones);
        let a_log =
            parameters.add("linear_attn.A_log", [num_value_heads], Init::LogUniform { bounds: DECAYS });
        let norm = Norm::new(parameters, "linear_attn.norm", value_head_dim, NormConfig::from(eps));
        let (mixed, norm) = (Mixed { qkv, b, a }, GatedNorm::OfHeads(norm));
        Self { shape, mixed, z, out, conv, channels, dt_bias, a_log, skip: None, norm }
    }

    /// Adds the parameters of Mamba 2 under `name`.
    fn mamba2(
        parameters: &mut ParameterList,
        name: &str,
        hidden_size: usize,
        (shape, options): (LinearAttentionConfig, Mamba2Config),
        eps: f64,
        [init, out_init]: [Init; 2],
    ) -> Self {
        let LinearAttentionConfig { num_key_heads, num_value_heads: heads, conv_width, .. } = shape;
        let Mamba2Config { time_step_bias, conv_bias, projection_bias, .. } = options;
        let named = |part: &str| format!("{name}.{part}");
        let (key_dim, value_dim, num_channels) =
            (shape.key_dim(), shape.value_dim(), 2 * shape.key_dim() + shape.value_dim());
        let (in_proj, out_proj, conv1d) = (named("in_proj"), named("out_proj"), named("conv1d"));
        let (names, outs) = (GroupNames::One(&in_proj), [value_dim, value_dim, key_dim, key_dim, heads]);
        let mut projections = Linear::group(parameters, names, outs, hidden_size, init);
        let mut out = Linear::new(parameters, &out_proj, [hidden_size, value_dim], out_init);
        if projection_bias {
            Linear::add_group_bias(parameters, names, projections.each_mut());
            out.add_bias(parameters, &out_proj);
        }
        let [z, v, k, q, a] = projections;
        let channels = [value_dim + key_dim..num_channels, value_dim..value_dim + key_dim, 0..value_dim];
        let mut conv = CausalConv::new(parameters, &conv1d, [num_channels, conv_width], init, true);
        if conv_bias {
            conv.add_bias(parameters, &conv1d, num_channels);
        }
        let mut of_heads = |part: &str, init| parameters.add(&named(part), [heads], init);
        let dt_bias = of_heads("dt_bias", time_step_bias);
        let a_log = of_heads("A_log", Init::LogUniform { bounds: MAMBA_DECAYS });
        let skip = Some(of_heads("D", Init::Ones));
        let groups = [num_key_heads, value_dim / num_key_heads];
        let norm =
            GatedNorm::OfGroups(Norm::group(parameters, &named("norm"), groups, NormConfig::from(eps)));
        let mixed = Mixed { qkv: [q, k, v], b: None, a };
        Self { shape, mixed, z, out, conv, channels, dt_bias, a_log, skip, norm }
    }

    /// Exchanges the output of the heads, or its gradient.
    fn exchange_output(
        &self,
        out: Tensor,
        direction: (Gathered, bool),
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        pass.ctx.exchange_values(out, self.shape.heads(), direction)
    }

    /// Exchanges the inputs of the heads, or their gradients.
    fn exchange_mixed(
        &self,
        mixed: Mixed<Tensor>,
        direction: (Gathered, bool),
        pass: &ForwardPass<'_>,
    ) -> Result<Mixed<Tensor>, LayerError> {
        let kinds = self.shape.exchanged();
        let received = pass.ctx.exchange_heads(mixed.into(), kinds, self.shape.heads(), direction)?;
        Ok(Mixed::from_list(received).unwrap_or_else(|| unreachable!("one result per tensor")))
    }
}
