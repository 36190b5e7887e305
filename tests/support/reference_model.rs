//! The models of the reference, as the library describes them.

use super::reference::families::{GRANITE, LLAMA4_GROWTH, LOGIT_SCALE, NUM_POSITIONS, QUERY_GROWTH};
use super::reference::{Family, ReferenceConfig, RopeScaling};
use super::reference::{kimi_delta, latent_attention, linear_attention, mamba2, short_conv};
use ulysses::kernels::rope::{Rope, Scaling};
use ulysses::model::{ModelConfig, Multipliers, family};
use ulysses::nn::{
    AttentionConfig, Init, LatentConfig, LinearAttentionConfig, LinearAttentionKind, Mamba2Config,
    MixerConfig, QkNorm, ShortConvConfig,
};

/// The linear attention of the reference.
fn linear_config(family: Family) -> LinearAttentionConfig {
    let [num_key_heads, num_value_heads] = linear_attention::heads(family);
    LinearAttentionConfig {
        num_key_heads,
        num_value_heads,
        key_head_dim: linear_attention::HEAD_DIMS[0],
        value_head_dim: linear_attention::HEAD_DIMS[1],
        conv_width: linear_attention::CONV_WIDTH,
        kind: LinearAttentionKind::GatedDeltaNet,
    }
}

/// The linear attention with decays per channel of the reference.
const KIMI_DELTA: LinearAttentionConfig = LinearAttentionConfig {
    num_key_heads: kimi_delta::HEADS,
    num_value_heads: kimi_delta::HEADS,
    key_head_dim: kimi_delta::HEAD_DIM,
    value_head_dim: kimi_delta::HEAD_DIM,
    conv_width: kimi_delta::CONV_WIDTH,
    kind: LinearAttentionKind::KimiDelta,
};

/// The Mamba 2 of the reference.
fn mamba_config(config: &ReferenceConfig) -> LinearAttentionConfig {
    let limits = mamba2::time_step_limits(config);
    LinearAttentionConfig {
        num_key_heads: config.mamba_groups(),
        num_value_heads: mamba2::HEADS,
        key_head_dim: mamba2::STATE,
        value_head_dim: mamba2::HEAD_DIM,
        conv_width: mamba2::CONV_WIDTH,
        kind: LinearAttentionKind::Mamba2(Mamba2Config {
            time_step_limits: limits,
            time_step_bias: match config.family {
                Family::NemotronH => Init::TimeSteps { bounds: [limits[0], 0.1], floor: 1e-4 },
                _ => Init::Ones,
            },
            conv_bias: true,
            projection_bias: config.mamba_biases(),
        }),
    }
}

/// The latent attention of the reference.
fn latent_config(config: &ReferenceConfig) -> Option<LatentConfig> {
    let is_yarn = matches!(config.rope_scaling, RopeScaling::Yarn { .. });
    let has_mscale = config.family == Family::DeepseekV3 && is_yarn;
    config.family.is_latent().then(|| LatentConfig {
        q_rank: config.family.has_q_latent().then_some(latent_attention::Q_RANK),
        kv_rank: latent_attention::KV_RANK,
        rope_head_dim: latent_attention::ROPE_DIM,
        value_head_dim: latent_attention::VALUE_DIM,
        mscale_all_dim: if has_mscale { latent_attention::MSCALE_ALL_DIM } else { 0.0 },
    })
}

pub fn llama_config(config: &ReferenceConfig) -> ModelConfig {
    let model_type = match (config.family, config.qkv_bias, config.qk_norm, config.sliding_window) {
        (Family::Llama, false, false, None) => "llama",
        (Family::Llama, false, false, Some(_)) => "mistral",
        (Family::Llama, true, false, None) => "qwen2",
        (Family::Llama, false, true, None) => "qwen3",
        (Family::Llama4, false, false, Some(_)) => "llama4_text",
        (Family::Ministral | Family::GptOss, false, false, Some(_)) => "ministral",
        (Family::Ministral3, false, false, _) => "ministral3",
        (Family::Gemma, false, false, None) => "gemma",
        (Family::Gemma2, false, false, Some(_)) => "gemma2",
        (Family::Gemma3, false, false, Some(_)) => "gemma3_text",
        (Family::Gemma4, false, false, Some(_)) => "gemma4_text",
        (Family::Granite, false, false, None) => "granite",
        (Family::Olmo2, false, false, None) => "olmo2",
        (Family::Olmo3, false, false, Some(_)) => "olmo3",
        (Family::Exaone4, false, false, Some(_)) => "exaone4",
        (Family::Phi3, false, false, _) => "phi3",
        (Family::SmolLm3, false, false, None) => "smollm3",
        (Family::Glm, _, false, None) => "glm",
        (Family::Glm4, _, false, None) => "glm4",
        (Family::Cohere, false, false, None) => "cohere",
        (Family::Cohere2, false, false, Some(_)) => "cohere2",
        (Family::Qwen35, false, false, None) => "qwen3_5_text",
        (Family::Qwen3Next, false, false, None) => "qwen3_next",
        (Family::Ernie, _, false, None) => "ernie4_5",
        (Family::Gpt2, false, false, None) => "gpt2",
        (Family::GptNeoX, false, false, None) => "gpt_neox",
        (Family::GptJ, false, false, None) => "gptj",
        (Family::Phi, false, _, None) => "phi",
        (Family::StarCoder2, false, false, _) => "starcoder2",
        (Family::Nemotron, _, false, None) => "nemotron",
        (Family::StableLm, _, false, None) => "stablelm",
        (Family::Lfm2, _, false, None) => "lfm2",
        (Family::GraniteHybrid, _, false, None) => "granitemoehybrid",
        (Family::NemotronH, _, false, None) => "nemotron_h",
        (Family::DeepseekV2, false, false, None) => "deepseek_v2",
        (Family::DeepseekV3, false, false, None) => "deepseek_v3",
        (Family::Youtu, false, false, None) => "youtu",
        (Family::MiniCpm3, false, false, None) => "minicpm3",
        (Family::KimiLinear, false, false, None) => "kimi_linear",
        other => panic!("no family has {other:?}"),
    };
    let has_scale = [Family::Gemma2, Family::Gemma3, Family::Gemma4, Family::Granite, Family::GraniteHybrid];
    let [attention_cap, final_softcap] = config.family.softcaps();
    let rope = |scaled, theta: f64| Rope {
        scaling: scaling(scaled),
        partial_rotary_factor: config.partial_rotary_factor,
        interleaved: config.family.is_interleaved(),
        query_growth: if config.family == Family::Ministral3 { QUERY_GROWTH } else { 0.0 },
        ..theta.into()
    };
    let is_llama4 = config.family == Family::Llama4;
    let growth = Rope {
        scaling: Scaling::Unrotated { original_len: LLAMA4_GROWTH.1 },
        query_growth: LLAMA4_GROWTH.0,
        ..10_000.0.into()
    };
    let layer = |config: &ReferenceConfig, layer: usize| AttentionConfig {
        num_heads: config.num_heads,
        num_kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        window: config.window(layer).filter(|_| !is_llama4),
        chunk: config.window(layer).filter(|_| is_llama4).map(|chunk| chunk as u32),
        rope: match config.theta(layer) {
            Some(theta) => Some(rope(config.rope_scaling, theta)),
            None => is_llama4.then_some(growth),
        },
        scale: match config.family.is_latent() {
            true => latent_config(config)
                .filter(|latent| latent.mscale_all_dim != 0.0)
                .map(|_| latent_attention::scale(config)),
            false => has_scale.contains(&config.family).then(|| config.attention_scale()),
        },
        qk_norm: match config.qk_norm_sizes() {
            None => (is_llama4 && config.theta(layer).is_some()).then_some(QkNorm::HeadWithoutWeight),
            Some([size, _]) if size > config.head_dim => Some(QkNorm::AllHeads),
            Some(_) => Some(QkNorm::Head),
        },
        softcap: attention_cap,
        qkv_bias: config.has_qkv_bias(),
        o_bias: config.all_biases(),
        output_gate: config.family.has_delta_net(),
        values_from_keys: config.is_global(layer),
        value_norm: config.family == Family::Gemma4,
        sinks: config.family == Family::GptOss,
        latent: latent_config(config),
    };
    let conv =
        ShortConvConfig { channels: config.hidden_size, taps: short_conv::TAPS, bias: config.conv_bias() };
    let mixer = |index: usize| -> MixerConfig {
        match (config.is_linear(index), config.is_conv(index)) {
            (true, _) if config.family == Family::KimiLinear => KIMI_DELTA.into(),
            (true, _) => linear_config(config.family).into(),
            (_, true) => conv.into(),
            _ if config.is_mamba(index) => mamba_config(config).into(),
            _ if !config.has_attention(index) => MixerConfig::Mlp,
            _ => layer(&config.of_layer(index), index).into(),
        }
    };
    let [embedding, residual, _, logits] = match config.family {
        Family::Granite | Family::GraniteHybrid => GRANITE,
        Family::MiniCpm3 => {
            let [embedding, residual, logits] = config.minicpm3_factors();
            [embedding, residual, 1.0, logits]
        }
        family if family.is_gemma() => [(config.hidden_size as f64).sqrt(), 1.0, 1.0, 1.0],
        family if family.is_cohere() => [1.0, 1.0, 1.0, LOGIT_SCALE],
        _ => [1.0; 4],
    };
    ModelConfig {
        family: family(model_type).expect("it is registered"),
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        layers: (0..config.num_layers).map(mixer).collect(),
        rms_norm_eps: config.rms_norm_eps,
        norm_offset: config.family.norm_offset(),
        centered_norms: config.family.is_centered(),
        norm_bias: config.family.has_norm_bias(),
        mlp_bias: config.mlp_bias(),
        head_bias: config.family.has_head_bias(),
        learned_positions: (config.family == Family::Gpt2).then_some(NUM_POSITIONS),
        multipliers: Multipliers { embedding, residual, logits },
        final_softcap,
        initializer_range: 0.02,
        tie_word_embeddings: config.tie_word_embeddings,
    }
}

fn scaling(scaling: RopeScaling) -> Scaling {
    let len = |len: usize| u32::try_from(len).expect("a context length");
    match scaling {
        RopeScaling::Default => Scaling::None,
        RopeScaling::Linear { factor } => Scaling::Linear { factor },
        RopeScaling::Proportional { part } => Scaling::Proportional { part, factor: 1.0 },
        RopeScaling::Dynamic { factor, max_position_embeddings } => {
            Scaling::Dynamic { factor, original_len: len(max_position_embeddings) }
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len: len(original) }
        }
        RopeScaling::LongRope { short_factor, long_factor, attention_factor, original } => {
            Scaling::LongRope { short_factor, long_factor, attention_factor, original_len: len(original) }
        }
        RopeScaling::Yarn { factor, original } => Scaling::Yarn {
            factor,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 0.1 * factor.ln() + 1.0,
            original_len: len(original),
        },
    }
}
