//! Qwen3.5, its dense text model: three layers of Gated DeltaNet to one of attention with a gate. Norms have weights around 0,
//! but for that of the linear attention.

use crate::families::read::write_layer_types;
use crate::families::{
    DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use crate::nn::{AttentionConfig, LinearAttentionConfig, LinearAttentionKind, QkNorm};
use serde_json::{Value, json};
use ulysses_kernels::rope::Rope;

pub(in crate::families) static QWEN3_5: Family = Family {
    model_type: "qwen3_5_text",
    class: "Qwen3_5ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[KnownModel::new("Qwen3.5-9B", 8_953_803_264, 262_144, || published([4096, 32, 16, 4, 12288]))],
};

const LINEAR: &str = "linear_attention";

/// The part of a head that rotates in all published models.
const ROTATING: f64 = 0.25;

/// The linear attention of the first models.
const LINEAR_ATTENTION: LinearAttentionConfig = LinearAttentionConfig {
    num_key_heads: 16,
    num_value_heads: 32,
    key_head_dim: 128,
    value_head_dim: 128,
    conv_width: 4,
    kind: LinearAttentionKind::GatedDeltaNet,
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    // Predictors of further tokens, which transformers does not load; the state of linear attention is always f32.
    file.accept(&["mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"]);
    if file.has("attn_output_gate") && !file.flag("attn_output_gate")? {
        let expected = "the attention of this model_type always has a gate: it must be true, or left out";
        return Err(file.error("attn_output_gate", expected));
    }
    if file.get("mlp_only_layers").is_some_and(|layers| *layers != json!([])) {
        return Err(file.error("mlp_only_layers", "this model_type has no experts: leave it out"));
    }
    read_hybrid(file, &QWEN3_5)
}

/// A model of linear attention, and of attention with a gate.
pub(super) fn read_hybrid(file: &HfConfig<'_>, family: &'static Family) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.require_kv_heads()?;
    let attention = AttentionConfig {
        rope: Some(file.partial_rope(10_000.0, ROTATING)?),
        qk_norm: Some(QkNorm::Head),
        output_gate: true,
        ..file.heads_with_head_dim(256)?
    };
    let config = file.decoder(family, attention, 1e-6)?;
    let size = |key, default| Ok::<_, ModelError>(file.optional_size(key)?.unwrap_or(default));
    let linear = LinearAttentionConfig {
        num_key_heads: size("linear_num_key_heads", LINEAR_ATTENTION.num_key_heads)?,
        num_value_heads: size("linear_num_value_heads", LINEAR_ATTENTION.num_value_heads)?,
        key_head_dim: size("linear_key_head_dim", LINEAR_ATTENTION.key_head_dim)?,
        value_head_dim: size("linear_value_head_dim", LINEAR_ATTENTION.value_head_dim)?,
        conv_width: size("linear_conv_kernel_dim", LINEAR_ATTENTION.conv_width)?,
        kind: LinearAttentionKind::GatedDeltaNet,
    };
    let is_linear = linear_layers(file, config.num_layers())?;
    Ok(with_linear_layers(config, is_linear, linear))
}

/// Which layers have linear attention: by `layer_types`, or else all but every fourth, or as `full_attention_interval` says.
fn linear_layers(file: &HfConfig<'_>, num_layers: usize) -> Result<Vec<bool>, ModelError> {
    let interval = file.interval("full_attention_interval", 4)?;
    let by_interval = || (1..=num_layers).map(|layer| !layer.is_multiple_of(interval)).collect();
    Ok(file.layers_of_type(&[LINEAR], num_layers)?.unwrap_or_else(by_interval))
}

fn with_linear_layers(
    config: ModelConfig,
    is_linear: impl IntoIterator<Item = bool>,
    linear: LinearAttentionConfig,
) -> ModelConfig {
    ModelConfig { norm_offset: 1.0, ..config.with_mixer(is_linear, linear) }
}

/// The inverse of [`read_hybrid`].
pub(super) fn write(config: &ModelConfig, json: &mut Value) {
    write_layer_types(config, json, LINEAR);
    json["partial_rotary_factor"] = json!(config.rope().map(|rope| rope.partial_rotary_factor));
    let linear = config.linear_layers().next().unwrap_or(&LINEAR_ATTENTION);
    json["linear_num_key_heads"] = json!(linear.num_key_heads);
    json["linear_num_value_heads"] = json!(linear.num_value_heads);
    json["linear_key_head_dim"] = json!(linear.key_head_dim);
    json["linear_value_head_dim"] = json!(linear.value_head_dim);
    json["linear_conv_kernel_dim"] = json!(linear.conv_width);
}

fn published(sizes: Sizes) -> ModelConfig {
    let config = ModelConfig::with_sizes(&QWEN3_5, sizes).with_attention(|layer| {
        (layer.head_dim, layer.qk_norm, layer.output_gate) = (256, Some(QkNorm::Head), true);
        layer.rope = Some(Rope { partial_rotary_factor: ROTATING, ..10_000_000.0.into() });
    });
    let is_linear = (1..=config.num_layers()).map(|layer| !layer.is_multiple_of(4));
    let config = with_linear_layers(config, is_linear, LINEAR_ATTENTION);
    ModelConfig { vocab_size: 248_320, rms_norm_eps: 1e-6, ..config }
}
