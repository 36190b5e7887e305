//! Seed-OSS: Llama with biases on the projections of queries, keys and values.

use super::{DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames};
use crate::nn::AttentionConfig;
use serde_json::json;

pub(super) static SEED_OSS: Family = Family {
    model_type: "seed_oss",
    class: "SeedOssForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write: |_, json| json["attention_bias"] = json!(true),
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[KnownModel::new("Seed-OSS-36B", 36_151_104_512, 524_288, seed_oss_36b)],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", "silu")?;
    if file.get("attention_bias").is_some() && !file.flag("attention_bias")? {
        return Err(file.error("attention_bias", "this version computes it with biases"));
    }
    for key in ["attention_out_bias", "mlp_bias"] {
        if file.flag(key)? {
            return Err(file.error(key, "this version has biases on queries, keys and values only"));
        }
    }
    file.require_kv_heads()?;
    let layer = AttentionConfig { qkv_bias: true, ..file.attention_with_head_dim(128)? };
    let config = file.decoder(&SEED_OSS, layer, 1e-6)?;
    file.check_full_attention(&config)?;
    Ok(config)
}

fn seed_oss_36b() -> ModelConfig {
    let config = ModelConfig::with_sizes(&SEED_OSS, [5120, 64, 80, 8, 27648]);
    let config = config
        .with_attention(|layer| (layer.head_dim, layer.qkv_bias) = (128, true))
        .with_rope(|rope| rope.theta = 10_000_000.0);
    ModelConfig { vocab_size: 155_136, rms_norm_eps: 1e-6, ..config }
}
