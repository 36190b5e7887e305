//! Gemma 3, its text model: norms before and after every module with weights around 0, GeGLU, five layers with a window
//! to one without, and another rotary base for each (arXiv 2503.19786).

use super::read::{FULL, WINDOWED, write_windows};
use super::{
    DecoderLayer, DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, Multipliers, Sizes,
};
use crate::nn::{AttentionConfig, BranchNorms, QkNorm};
use serde_json::{Value, json};
use ulysses_kernels::glu::Activation;
use ulysses_kernels::rope::{Rope, Scaling};

pub(super) static GEMMA3: Family = Family {
    model_type: "gemma3_text",
    class: "Gemma3ForCausalLM",
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, PARTS)),
    models: &[
        KnownModel::new("gemma-3-270m", 268_098_176, 32_768, || published([640, 18, 4, 1, 2048])),
        KnownModel::new("gemma-3-1b", 999_885_952, 32_768, || published([1152, 26, 4, 1, 6912])),
    ],
};

const PARTS: DecoderParts = DecoderParts {
    attention_norms: BranchNorms { before: Some("input_layernorm"), after: Some("post_attention_layernorm") },
    mlp_norms: BranchNorms {
        before: Some("pre_feedforward_layernorm"),
        after: Some("post_feedforward_layernorm"),
    },
    activation: Activation::GeluTanh,
    fused_projections: false,
};

/// Rotary bases of the first models.
const THETA: f64 = 1_000_000.0;
const LOCAL_THETA: f64 = 10_000.0;

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_activation", "gelu_pytorch_tanh")?;
    file.accept(&["hidden_act"]);
    file.check_biases()?;
    file.require_kv_heads()?;
    for key in ["final_logit_softcapping", "attn_logit_softcapping"] {
        if file.get(key).is_some() {
            return Err(file.error(key, "this version does not cap logits: it must be null"));
        }
    }
    if file.flag("use_bidirectional_attention")? {
        return Err(file.error("use_bidirectional_attention", "this version computes causal attention only"));
    }
    let scalar = file.number("query_pre_attn_scalar", 256.0)?;
    let by_type = |layer_type| file.rope_by_layer_type(layer_type);
    let (global, local) = (by_type(FULL)?, by_type(WINDOWED)?);
    let global = global.map_or_else(|| file.rope_with_default(THETA), Ok)?;
    let local_theta = file.number("rope_local_base_freq", LOCAL_THETA)?;
    let local = local.unwrap_or(Rope { theta: local_theta, scaling: Scaling::None });
    file.accept(&["rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings"]);
    let head_dim = file.optional_size("head_dim")?.unwrap_or(256);
    let layer = AttentionConfig {
        head_dim,
        rope: Some(global),
        scale: Some(1.0 / scalar.sqrt()),
        qk_norm: Some(QkNorm::Head),
        ..file.heads()?
    };
    let config = file.decoder(&GEMMA3, layer)?;
    let pattern = file.optional_size("sliding_window_pattern")?.unwrap_or(6).max(1);
    let windowed = file.windowed_layers(config.num_layers(), |index| (index + 1) % pattern != 0)?;
    let window = file.optional_size("sliding_window")?.unwrap_or(4096);
    let tie_word_embeddings = file.get("tie_word_embeddings").is_none() || config.tie_word_embeddings;
    Ok(with_windows(ModelConfig { tie_word_embeddings, ..config }, &windowed, window, local))
}

/// The windows with their rotary embedding, and what all models have in common.
fn with_windows(config: ModelConfig, windowed: &[bool], window: usize, local: Rope) -> ModelConfig {
    let mut config = config;
    for (layer, _) in config.layers.iter_mut().zip(windowed).filter(|(_, windowed)| **windowed) {
        (layer.window, layer.rope) = (Some(window), Some(local));
    }
    let embedding = (config.hidden_size as f64).sqrt();
    let multipliers = Multipliers { embedding, ..Multipliers::default() };
    ModelConfig { norm_offset: 1.0, multipliers, ..config }
}

fn write(config: &ModelConfig, json: &mut Value) {
    write_windows(config, json);
    json["hidden_activation"] = json!("gelu_pytorch_tanh");
    let scale = config.layers.first().and_then(|layer| layer.scale);
    json["query_pre_attn_scalar"] = json!(scale.map_or(256.0, |scale| decimal(1.0 / (scale * scale))));
    let windowed = config.layers.iter().find(|layer| layer.window.is_some());
    if let Some(Some(local)) = windowed.map(|layer| layer.rope) {
        json["rope_local_base_freq"] = json!(local.theta);
    }
}

/// The number that was written before its square root was taken.
fn decimal(number: f64) -> f64 {
    format!("{number:.12e}").parse().unwrap_or(number)
}

fn published(sizes: Sizes) -> ModelConfig {
    let config = ModelConfig::with_sizes(&GEMMA3, sizes).with_rope(|rope| rope.theta = THETA).with_attention(
        |layer| (layer.head_dim, layer.scale, layer.qk_norm) = (256, Some(0.0625), Some(QkNorm::Head)),
    );
    let config = ModelConfig { vocab_size: 262_144, rms_norm_eps: 1e-6, tie_word_embeddings: true, ..config };
    let windowed: Vec<bool> = (1..=config.num_layers()).map(|layer| layer % 6 != 0).collect();
    with_windows(config, &windowed, 512, Rope { theta: LOCAL_THETA, scaling: Scaling::None })
}
