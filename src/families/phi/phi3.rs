//! Phi-3 and Phi-4: Llama with the projections of queries, keys and values in one parameter,
//! and gate and up projection. Longer versions have `longrope`, and Phi-4 mini rotates three quarters of each head.

use crate::families::{
    DecoderLayer, DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use crate::nn::{AttentionConfig, AttentionProjections, MlpProjections};
use serde_json::{Value, json};
use ulysses_kernels::rope::Scaling;

pub(in crate::families) static PHI3: Family = Family {
    model_type: "phi3",
    class: "Phi3ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, PARTS)),
    models: &[
        KnownModel::new("Phi-3-mini-4k", 3_821_079_552, 4096, || {
            let config = published(MINI, 32_064, 10_000.0);
            config.with_attention(|layer| layer.window = Some(2047))
        }),
        KnownModel::new("Phi-3-mini-128k", 3_821_079_552, 131_072, || {
            long(published(MINI, 32_064, 10_000.0))
        }),
        KnownModel::new("Phi-3.5-mini", 3_821_079_552, 131_072, || long(published(MINI, 32_064, 10_000.0))),
        KnownModel::new("phi-4", 14_659_507_200, 16_384, || {
            published([5120, 40, 40, 10, 17920], 100_352, 250_000.0)
        }),
        KnownModel::new("Phi-4-mini", 3_836_021_760, 131_072, || {
            let config = published([3072, 32, 24, 8, 8192], 200_064, 10_000.0);
            let config = long(config.with_rope(|rope| rope.partial_rotary_factor = 0.75));
            ModelConfig { tie_word_embeddings: true, ..config }
        }),
    ],
};

const PARTS: DecoderParts = DecoderParts {
    attention: AttentionProjections::FUSED,
    mlp: MlpProjections::FUSED,
    ..DecoderParts::LLAMA
};

const MINI: Sizes = [3072, 32, 32, 32, 8192];

const ORIGINAL_LEN: &str = "original_max_position_embeddings";

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    let rope = file.partial_rope(10_000.0, 1.0)?;
    match rope.scaling {
        Scaling::None => {}
        // transformers uses 4096 then, even if the object has it.
        Scaling::LongRope { .. } if file.get(ORIGINAL_LEN).is_none() => {
            return Err(file.error(ORIGINAL_LEN, "it must be given, beside `rope_scaling`"));
        }
        Scaling::LongRope { .. } => {}
        _ => return Err(file.error("rope_scaling", "this model_type has \"longrope\" and no other scaling")),
    }
    let window = file.optional_size("sliding_window")?;
    file.decoder(&PHI3, AttentionConfig { window, rope: Some(rope), ..file.heads()? }, 1e-5)
}

fn write(config: &ModelConfig, json: &mut Value) {
    json["sliding_window"] = json!(config.attention_layers().next().and_then(|layer| layer.window));
    // As published: older versions of transformers accept no other fields of the object.
    if let Some(Value::Object(scaling)) = json.get_mut("rope_scaling") {
        let (kind, original_len) = (scaling.remove("rope_type"), scaling.remove(ORIGINAL_LEN));
        scaling.insert("type".to_owned(), json!(kind));
        json[ORIGINAL_LEN] = json!(original_len);
    }
}

fn published(sizes: Sizes, vocab_size: usize, theta: f64) -> ModelConfig {
    let config = ModelConfig::with_sizes(&PHI3, sizes).with_rope(|rope| rope.theta = theta);
    ModelConfig { vocab_size, ..config }
}

/// The version for 128k tokens. Its factors, which no plan depends on, are in its `config.json`; here they are 1.
fn long(config: ModelConfig) -> ModelConfig {
    const FACTORS: &[f64] = &[1.0; 48];
    let scaling = Scaling::LongRope {
        short_factor: FACTORS,
        long_factor: FACTORS,
        attention_factor: (1.0 + 32f64.ln() / 4096f64.ln()).sqrt(),
        original_len: 4096,
    };
    config.with_attention(|layer| layer.window = Some(262_144)).with_rope(|rope| rope.scaling = scaling)
}
