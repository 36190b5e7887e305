//! StableLM: Llama with LayerNorm, rotation of a quarter of each head, and in some models biases on queries, keys and values.

use super::read::remove_fields;
use super::{DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes};
use crate::nn::AttentionConfig;
use serde_json::{Value, json};

pub(super) static STABLELM: Family = Family {
    model_type: "stablelm",
    class: "StableLmForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[
        KnownModel::new("stablelm-3b-4e1t", 2_795_443_200, 4096, || {
            let config = published([2560, 32, 32, 32, 6912], false);
            ModelConfig { vocab_size: 50_304, ..config }
        }),
        KnownModel::new("stablelm-2-1_6b", 1_644_515_328, 4096, || {
            let config = published([2048, 24, 32, 32, 5632], true);
            ModelConfig { vocab_size: 100_352, ..config }
        }),
    ],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", "silu")?;
    file.require_kv_heads()?;
    for (key, expected) in [
        ("use_parallel_residual", "this version computes the MLP after the attention here: it must be false"),
        ("qk_layernorm", "this version has no norms of queries and keys here: it must be false"),
    ] {
        if file.flag(key)? {
            return Err(file.error(key, expected));
        }
    }
    let heads = file.heads()?;
    if heads.num_heads * heads.head_dim != file.size("hidden_size")? {
        return Err(file.error("num_attention_heads", "it must divide hidden_size, and head_dim be left out"));
    }
    let rope = Some(file.partial_rope(10_000.0, 0.25)?);
    let layer = AttentionConfig { rope, qkv_bias: file.flag("use_qkv_bias")?, ..heads };
    let config = file.decoder(&STABLELM, layer, 1e-5)?;
    file.check_full_attention(&config)?;
    let rms_norm_eps = file.eps("layer_norm_eps", 1e-5)?;
    Ok(ModelConfig { rms_norm_eps, centered_norms: true, norm_bias: true, ..config })
}

fn write(config: &ModelConfig, json: &mut Value) {
    remove_fields(json, &["rms_norm_eps", "head_dim"]);
    json["layer_norm_eps"] = json!(config.rms_norm_eps);
    json["partial_rotary_factor"] = json!(config.rope().map(|rope| rope.partial_rotary_factor));
    json["use_qkv_bias"] = json!(config.attention_layers().next().is_some_and(|layer| layer.qkv_bias));
}

fn published(sizes: Sizes, qkv_bias: bool) -> ModelConfig {
    let config = ModelConfig::with_sizes(&STABLELM, sizes)
        .with_attention(|layer| layer.qkv_bias = qkv_bias)
        .with_rope(|rope| rope.partial_rotary_factor = 0.25);
    ModelConfig { centered_norms: true, norm_bias: true, ..config }
}
