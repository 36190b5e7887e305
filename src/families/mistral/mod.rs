//! Mistral: Llama with a sliding window.

use super::read::SAME_ATTENTION;
use super::{DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError};
use crate::nn::AttentionConfig;
use serde_json::{Value, json};

pub(super) static MISTRAL: Family = Family {
    model_type: "mistral",
    class: "MistralForCausalLM",
    read,
    // Not left out if there is none, which would mean the window of the first model.
    write: |config, json| {
        json["sliding_window"] = json!(config.layers.first().and_then(|layer| layer.window))
    },
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[KnownModel::new("Mistral-7B-v0.3", 7_248_023_552, 32_768, v0_3)],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.accept(&["use_sliding_window"]);
    if file.get("layer_types").is_some_and(Value::is_array) {
        return Err(file.error("layer_types", SAME_ATTENTION));
    }
    file.require_kv_heads()?;
    // Absent means the window of Mistral 7B, `null` none.
    let window = match file.has("sliding_window") {
        true => file.optional_size("sliding_window")?,
        false => Some(4096),
    };
    file.decoder(&MISTRAL, AttentionConfig { window, ..file.attention()? })
}

fn v0_3() -> ModelConfig {
    let config = ModelConfig::with_sizes(&MISTRAL, [4096, 32, 32, 8, 14336]);
    ModelConfig { vocab_size: 32_768, ..config.with_attention(|layer| layer.rope.theta = 1_000_000.0) }
}
