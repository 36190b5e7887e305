//! ERNIE 4.5 (dense): Llama with neighboring elements that rotate as pairs, and biases on all projections if the model has them.

use super::{DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames};
use crate::nn::AttentionConfig;
use serde_json::json;

pub(super) static ERNIE4_5: Family = Family {
    model_type: "ernie4_5",
    class: "Ernie4_5ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write: |config, json| json["use_bias"] = json!(config.mlp_bias),
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[KnownModel::new("ERNIE-4.5-0.3B-PT", 360_748_032, 131_072, || {
        let config = ModelConfig::with_sizes(&ERNIE4_5, [1024, 18, 16, 2, 3072]);
        let config = config
            .with_attention(|layer| layer.head_dim = 128)
            .with_rope(|rope| (rope.theta, rope.interleaved) = (THETA, true));
        ModelConfig { vocab_size: 103_424, tie_word_embeddings: true, ..config }
    })],
};

const THETA: f64 = 500_000.0;

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", "silu")?;
    file.require_kv_heads()?;
    let mut rope = file.rope_with_default(THETA)?;
    rope.interleaved = true;
    let bias = file.flag("use_bias")?;
    let heads = file.heads_with_head_dim(128)?;
    let layer = AttentionConfig { rope: Some(rope), qkv_bias: bias, o_bias: bias, ..heads };
    let config = file.decoder(&ERNIE4_5, layer, 1e-5)?;
    file.check_full_attention(&config)?;
    Ok(file.tied_by_default(ModelConfig { mlp_bias: bias, ..config }))
}
