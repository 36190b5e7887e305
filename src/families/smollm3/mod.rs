//! SmolLM3: Llama without position embedding in every fourth layer.

use super::{DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames};
use crate::nn::AttentionConfig;

pub(super) static SMOLLM3: Family = Family {
    model_type: "smollm3",
    class: "SmolLM3ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write: |config, json| {
        let has_rope = config.attention_layers().map(|layer| u8::from(layer.rope.is_some()));
        json["no_rope_layers"] = has_rope.collect();
    },
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[KnownModel::new("SmolLM3-3B", 3_075_098_624, 65_536, smollm3_3b)],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.require_kv_heads()?;
    let rope = Some(file.rope_with_default(2_000_000.0)?);
    let mut config = file.decoder(&SMOLLM3, AttentionConfig { rope, ..file.heads()? }, 1e-6)?;
    file.check_full_attention(&config)?;
    let rotates = file.rotating_layers(config.num_layers())?;
    for (layer, _) in config.attention_layers_mut().zip(rotates).filter(|(_, rotates)| !rotates) {
        layer.rope = None;
    }
    Ok(file.tied_by_default(config))
}

fn smollm3_3b() -> ModelConfig {
    let config = ModelConfig::with_sizes(&SMOLLM3, [2048, 36, 16, 4, 11008]);
    let mut config = config.with_rope(|rope| rope.theta = 5_000_000.0);
    config.attention_layers_mut().skip(3).step_by(4).for_each(|layer| layer.rope = None);
    ModelConfig { vocab_size: 128_256, rms_norm_eps: 1e-6, tie_word_embeddings: true, ..config }
}
