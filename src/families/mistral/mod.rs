//! Mistral: Llama with a sliding window.

mod ministral;
mod ministral3;

pub(super) use ministral::MINISTRAL;
pub(super) use ministral3::MINISTRAL3;

use super::{DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames};
use crate::nn::AttentionConfig;
use serde_json::json;

pub(super) static MISTRAL: Family = Family {
    model_type: "mistral",
    class: "MistralForCausalLM",
    names: ModelNames::LLAMA,
    read,
    // Not left out if there is none, which would mean the window of the first model.
    write: |config, json| {
        json["sliding_window"] = json!(config.attention_layers().next().and_then(|layer| layer.window))
    },
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[KnownModel::new("Mistral-7B-v0.3", 7_248_023_552, 32_768, v0_3)],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.accept(&["use_sliding_window"]);
    file.require_kv_heads()?;
    let window = file.window_or(4096)?;
    let config = file.decoder(&MISTRAL, AttentionConfig { window, ..file.attention()? }, 1e-6)?;
    // transformers gives every layer the window, whatever this says.
    let windowed = file.windowed_layers(config.num_layers(), |_| window.is_some())?;
    match windowed.iter().all(|windowed| *windowed == window.is_some()) {
        true => Ok(config),
        false => Err(file.error("layer_types", "the layers of Mistral have one window, `sliding_window`")),
    }
}

fn v0_3() -> ModelConfig {
    let config = ModelConfig::with_sizes(&MISTRAL, [4096, 32, 32, 8, 14336]);
    ModelConfig { vocab_size: 32_768, ..config.with_rope(|rope| rope.theta = 1_000_000.0) }
}
