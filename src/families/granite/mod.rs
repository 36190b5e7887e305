//! Granite 3, and the dense hybrids of Granite 4: Llama with constant factors on embedding, residual branches, attention and
//! logits.

mod hybrid;

pub(super) use hybrid::GRANITE_HYBRID;

use super::{
    DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Multipliers, Sizes,
};
use crate::nn::AttentionConfig;
use serde_json::{Value, json};

pub(super) static GRANITE: Family = Family {
    model_type: "granite",
    class: "GraniteForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[
        KnownModel::new("granite-3.3-2b", 2_533_539_840, 131_072, || {
            published([2048, 40, 32, 8, 8192], 1.0 / 64.0, 8.0)
        }),
        KnownModel::new("granite-3.3-8b", 8_170_864_640, 131_072, || {
            published([4096, 40, 32, 8, 12800], 1.0 / 128.0, 16.0)
        }),
    ],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    let (multipliers, scale) = multipliers(file)?;
    let layer = AttentionConfig { scale: Some(scale), ..file.attention()? };
    let config = file.decoder(&GRANITE, layer, 1e-6)?;
    file.check_full_attention(&config)?;
    Ok(ModelConfig { multipliers, ..config })
}

/// The factors, and that of the logits of attention.
fn multipliers(file: &HfConfig<'_>) -> Result<(Multipliers, f64), ModelError> {
    let factor = |key| match file.number(key, 1.0)? {
        factor if factor.is_finite() && factor > 0.0 => Ok(factor),
        _ => Err(file.error(key, "it must be positive")),
    };
    let multipliers = Multipliers {
        embedding: factor("embedding_multiplier")?,
        residual: factor("residual_multiplier")?,
        logits: 1.0 / factor("logits_scaling")?,
    };
    Ok((multipliers, factor("attention_multiplier")?))
}

fn write(config: &ModelConfig, json: &mut Value) {
    write_multipliers(config, json);
}

/// The inverse of [`multipliers`].
fn write_multipliers(config: &ModelConfig, json: &mut Value) {
    let Multipliers { embedding, residual, logits } = config.multipliers;
    let scale = config.attention_layers().next().and_then(|layer| layer.scale);
    json["attention_multiplier"] = json!(scale.unwrap_or(1.0));
    json["embedding_multiplier"] = json!(embedding);
    json["residual_multiplier"] = json!(residual);
    json["logits_scaling"] = json!(1.0 / logits);
}

fn published(sizes: Sizes, scale: f64, logits_scaling: f64) -> ModelConfig {
    let config = ModelConfig::with_sizes(&GRANITE, sizes)
        .with_attention(|layer| layer.scale = Some(scale))
        .with_rope(|rope| rope.theta = 10_000_000.0);
    let multipliers = Multipliers { embedding: 12.0, residual: 0.22, logits: 1.0 / logits_scaling };
    ModelConfig { vocab_size: 49_159, tie_word_embeddings: true, multipliers, ..config }
}
