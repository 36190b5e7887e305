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
//! Kimi Delta Attention (arXiv 2510.26692) is that with a decay for each channel of a head's keys, projections and convolutions with
//! weights of their own, `in_proj_a` and `in_proj_z` of low rank, and the gate σ(z).
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
mod projections;
mod saved;

pub use config::{LinearAttentionConfig, LinearAttentionKind, Mamba2Config};
pub use projections::{DeltaNetProjections, LinearAttentionProjections};
pub use saved::LinearAttentionSaved;

use super::causal_conv::CausalConv;
use super::projection::Projection;
use super::{
    ForwardPass, GroupNames, HeadTransfer, Init, LayerError, Linear, ModuleWeights, Norm, NormConfig,
    Parameter, ParameterList,
};
use candle_core::Tensor;
use gated_norm::GatedNorm;
use mixed::Mixed;
use std::ops::Range;
use ulysses_kernels::glu::Activation::{Sigmoid, Silu};
use ulysses_kernels::linear_attention::Rule;

/// The bounds of exp(A_log) at first, as in transformers.
const DECAYS: [f64; 2] = [0.01, 16.0];

/// Those of Mamba 2, as in its authors' code, and of Kimi Delta Attention.
const MAMBA_DECAYS: [f64; 2] = [1.0, 16.0];

/// The biases of the decays of Kimi Delta Attention, as in transformers.
const KIMI_TIME_STEPS: Init = Init::TimeSteps { bounds: [1e-3, 1e-1], floor: 1e-4 };

/// A linear attention, without the branch that it is in.
#[derive(Debug)]
pub struct LinearAttention {
    shape: LinearAttentionConfig,
    mixed: Mixed<Projection>,
    z: Projection,
    out: Linear,
    /// Of queries, keys, values: one for all, or one for each.
    convs: [CausalConv; 3],
    /// The channels of each of them.
    channels: [Range<usize>; 3],
    dt_bias: Parameter,
    a_log: Parameter,
    /// With the skip connection of each head: D of Mamba 2.
    rule: Rule<Parameter>,
    norm: GatedNorm,
}

impl LinearAttention {
    /// Adds the parameters under `linear_attn`, the name of a Mamba 2, or `self_attn` for Kimi Delta Attention. `eps`: that of the norms.
    pub fn new(
        parameters: &mut ParameterList,
        LinearAttentionProjections { mamba, delta_net }: LinearAttentionProjections,
        hidden_size: usize,
        shape: LinearAttentionConfig,
        eps: f64,
        weights: ModuleWeights,
    ) -> Self {
        match shape.kind {
            LinearAttentionKind::GatedDeltaNet => {
                Self::gated_delta_net(parameters, delta_net, hidden_size, shape, eps, weights)
            }
            LinearAttentionKind::KimiDelta => Self::kimi_delta(parameters, hidden_size, shape, eps, weights),
            LinearAttentionKind::Mamba2(options) => {
                Self::mamba2(parameters, mamba, hidden_size, shape, options, eps, weights)
            }
        }
    }

    fn gated_delta_net(
        parameters: &mut ParameterList,
        projections: DeltaNetProjections,
        hidden_size: usize,
        shape: LinearAttentionConfig,
        eps: f64,
        weights: ModuleWeights,
    ) -> Self {
        let LinearAttentionConfig { num_value_heads, value_head_dim, conv_width, .. } = shape;
        let init = weights.input.init;
        let (key_dim, value_dim) = (shape.key_dim(), shape.value_dim());
        let (mixed, z) = projections.add(parameters, hidden_size, shape, weights.input);
        let out = Linear::new(parameters, "linear_attn.out_proj", [hidden_size, value_dim], weights.output);
        let num_channels = 2 * key_dim + value_dim;
        let channels = [0..key_dim, key_dim..2 * key_dim, 2 * key_dim..num_channels];
        let conv = CausalConv::new(parameters, "linear_attn.conv1d", num_channels, conv_width, init, true);
        let dt_bias = parameters.add("linear_attn.dt_bias", [num_value_heads], Init::Ones);
        let a_log =
            parameters.add("linear_attn.A_log", [num_value_heads], Init::LogUniform { bounds: DECAYS });
        let norm = Norm::new(parameters, "linear_attn.norm", value_head_dim, NormConfig::from(eps));
        let (mixed, z) = (mixed.map(Projection::Direct), Projection::Direct(z));
        let (convs, norm) = ([conv; 3], GatedNorm::OfHeads(norm, Silu));
        Self { shape, mixed, z, out, convs, channels, dt_bias, a_log, rule: Rule::Delta, norm }
    }

    fn kimi_delta(
        parameters: &mut ParameterList,
        hidden_size: usize,
        shape: LinearAttentionConfig,
        eps: f64,
        weights: ModuleWeights,
    ) -> Self {
        let LinearAttentionConfig { num_value_heads: heads, value_head_dim: rank, conv_width, .. } = shape;
        let (dim, weight, init) = (shape.key_dim(), weights.input, weights.input.init);
        let named = |part: &str| format!("self_attn.{part}");
        let qkv = ["q", "k", "v"]
            .map(|part| Linear::new(parameters, &named(&format!("{part}_proj")), [dim, hidden_size], weight));
        let convs = ["q", "k", "v"].map(|part| {
            CausalConv::new(parameters, &named(&format!("{part}_conv1d")), dim, conv_width, init, true)
        });
        let mut low_rank = |name: &str| {
            let down =
                Linear::new(parameters, &named(&format!("{name}_a_proj")), [rank, hidden_size], weight);
            Projection::through_latent(parameters, &named(&format!("{name}_b_proj")), down, None, dim, weight)
        };
        let (a, z) = (low_rank("f"), low_rank("g"));
        let b = Some(Linear::new(parameters, &named("b_proj"), [heads, hidden_size], weight));
        let a_log = Init::LogUniform { bounds: MAMBA_DECAYS };
        let a_log = parameters.add(&named("A_log"), [1, 1, heads, 1], a_log);
        let dt_bias = parameters.add(&named("dt_bias"), [dim], KIMI_TIME_STEPS);
        let norm = Norm::new(parameters, &named("o_norm"), rank, NormConfig::from(eps));
        let out = Linear::new(parameters, &named("o_proj"), [hidden_size, dim], weights.output);
        let (qkv, b) = (qkv.map(Projection::Direct), b.map(Projection::Direct));
        let (mixed, channels) = (Mixed { qkv, b, a }, [0..dim, 0..dim, 0..dim]);
        let norm = GatedNorm::OfHeads(norm, Sigmoid);
        Self { shape, mixed, z, out, convs, channels, dt_bias, a_log, rule: Rule::ChannelDelta, norm }
    }

    /// Adds the parameters of Mamba 2 under `name`.
    fn mamba2(
        parameters: &mut ParameterList,
        name: &str,
        hidden_size: usize,
        shape: LinearAttentionConfig,
        options: Mamba2Config,
        eps: f64,
        weights: ModuleWeights,
    ) -> Self {
        let LinearAttentionConfig { num_key_heads, num_value_heads: heads, conv_width, .. } = shape;
        let Mamba2Config { time_step_bias, conv_bias, projection_bias, .. } = options;
        let named = |part: &str| format!("{name}.{part}");
        let (key_dim, value_dim, num_channels) =
            (shape.key_dim(), shape.value_dim(), 2 * shape.key_dim() + shape.value_dim());
        let (in_proj, out_proj, conv1d) = (named("in_proj"), named("out_proj"), named("conv1d"));
        let (names, outs) = (GroupNames::One(&in_proj), [value_dim, value_dim, key_dim, key_dim, heads]);
        let mut projections = Linear::group(parameters, names, outs, hidden_size, weights.input);
        let mut out = Linear::new(parameters, &out_proj, [hidden_size, value_dim], weights.output);
        if projection_bias {
            Linear::add_group_bias(parameters, names, projections.each_mut());
            out.add_bias(parameters, &out_proj);
        }
        let [z, v, k, q, a] = projections;
        let channels = [value_dim + key_dim..num_channels, value_dim..value_dim + key_dim, 0..value_dim];
        let mut conv =
            CausalConv::new(parameters, &conv1d, num_channels, conv_width, weights.input.init, true);
        if conv_bias {
            conv.add_bias(parameters, &conv1d, num_channels);
        }
        let mut of_heads = |part: &str, init| parameters.add(&named(part), [heads], init);
        let dt_bias = of_heads("dt_bias", time_step_bias);
        let a_log = of_heads("A_log", Init::LogUniform { bounds: MAMBA_DECAYS });
        let rule = Rule::Sum { skip: of_heads("D", Init::Ones) };
        let groups = [num_key_heads, value_dim / num_key_heads];
        let norm =
            GatedNorm::OfGroups(Norm::group(parameters, &named("norm"), groups, NormConfig::from(eps)));
        let mixed = Mixed { qkv: [q, k, v], b: None, a }.map(Projection::Direct);
        let (z, convs) = (Projection::Direct(z), [conv; 3]);
        Self { shape, mixed, z, out, convs, channels, dt_bias, a_log, rule, norm }
    }

    /// Exchanges the output of the heads, or its gradient.
    fn exchange_output(
        &self,
        out: Tensor,
        transfer: HeadTransfer,
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        pass.ctx.exchange_values(out, self.shape.heads(), transfer)
    }

    /// Exchanges the inputs of the heads, or their gradients.
    fn exchange_mixed(
        &self,
        mixed: Mixed<Tensor>,
        transfer: HeadTransfer,
        pass: &ForwardPass<'_>,
    ) -> Result<Mixed<Tensor>, LayerError> {
        let kinds = self.shape.exchanged();
        let received = pass.ctx.exchange_heads(mixed.into(), kinds, self.shape.heads(), transfer)?;
        Ok(Mixed::from_list(received).unwrap_or_else(|| unreachable!("one result per tensor")))
    }
}
