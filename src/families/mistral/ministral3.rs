//! Ministral 3: Mistral with `yarn`, and queries that grow with their position.

use crate::families::hf::QUERY_GROWTH;
use crate::families::{
    DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use crate::nn::AttentionConfig;
use serde_json::{Value, json};
use ulysses_kernels::rope::{Rope, Scaling};

pub(in crate::families) static MINISTRAL3: Family = Family {
    model_type: "ministral3",
    class: "Ministral3ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    // The language models of vision-language models.
    models: &[
        KnownModel::new("Ministral-3-3B-Base-2512", 3_429_006_336, MAX_POSITIONS, || {
            let config = published([3072, 26, 32, 8, 9216], ROPE.theta);
            ModelConfig { tie_word_embeddings: true, ..config }
        }),
        KnownModel::new("Ministral-3-8B-Base-2512", 8_489_553_920, MAX_POSITIONS, || {
            published([4096, 34, 32, 8, 14336], ROPE.theta)
        }),
        KnownModel::new("Ministral-3-14B-Base-2512", 13_506_073_600, MAX_POSITIONS, || {
            published([5120, 40, 32, 8, 16384], 1e9)
        }),
    ],
};

const MAX_POSITIONS: usize = 262_144;

/// The rotary embedding of the first models.
const ROPE: Rope = Rope {
    theta: 1e6,
    scaling: Scaling::Yarn {
        factor: 16.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor: 1.0,
        original_len: 16_384,
    },
    partial_rotary_factor: 1.0,
    interleaved: false,
    query_growth: 0.1,
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.require_kv_heads()?;
    // transformers replaces an absent object by the whole one of the first models, with its base.
    let rope = file.rope_with_query_growth()?.unwrap_or(ROPE);
    if !matches!(rope.scaling, Scaling::Yarn { .. }) {
        return Err(file.error("rope_parameters", "this model_type has \"yarn\" and no other scaling"));
    }
    let window = file.optional_size("sliding_window")?;
    let layer = AttentionConfig { window, rope: Some(rope), ..file.heads_with_head_dim(128)? };
    file.decoder(&MINISTRAL3, layer, 1e-5)
}

fn write(config: &ModelConfig, json: &mut Value) {
    json["sliding_window"] = json!(config.attention_layers().next().and_then(|layer| layer.window));
    if let (Some(rope), Some(Value::Object(scaling))) = (config.rope(), json.get_mut("rope_scaling")) {
        scaling.insert(QUERY_GROWTH.to_owned(), json!(rope.query_growth));
    }
}

fn published(sizes: Sizes, theta: f64) -> ModelConfig {
    let rope = Some(Rope { theta, ..ROPE });
    let config = ModelConfig::with_sizes(&MINISTRAL3, sizes);
    let config = config.with_attention(|layer| (layer.head_dim, layer.rope) = (128, rope));
    ModelConfig { vocab_size: 131_072, ..config }
}
