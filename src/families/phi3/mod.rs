//! Phi-3 and Phi-4: Llama with the projections of queries, keys and values in one parameter, and gate and up projection.

use super::{DecoderLayer, DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, Sizes};
use crate::nn::AttentionConfig;
use serde_json::json;
use ulysses_kernels::rope::Scaling;

pub(super) static PHI3: Family = Family {
    model_type: "phi3",
    class: "Phi3ForCausalLM",
    read,
    write: |config, json| {
        json["sliding_window"] = json!(config.layers.first().and_then(|layer| layer.window));
    },
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, PARTS)),
    models: &[
        KnownModel::new("Phi-3-mini-4k", 3_821_079_552, 4096, || {
            let config = published([3072, 32, 32, 32, 8192], 32_064, 10_000.0);
            config.with_attention(|layer| layer.window = Some(2047))
        }),
        KnownModel::new("phi-4", 14_659_507_200, 16_384, || {
            published([5120, 40, 40, 10, 17920], 100_352, 250_000.0)
        }),
    ],
};

const PARTS: DecoderParts = DecoderParts { fused_projections: true, ..DecoderParts::LLAMA };

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    if file.rope()?.scaling != Scaling::None {
        return Err(file.error(
            "rope_scaling",
            "this version has no \"longrope\", and this model_type no other: leave it out",
        ));
    }
    let layer = AttentionConfig { window: file.optional_size("sliding_window")?, ..file.attention()? };
    let config = file.decoder(&PHI3, layer, 1e-5)?;
    Ok(config)
}

fn published(sizes: Sizes, vocab_size: usize, theta: f64) -> ModelConfig {
    let config = ModelConfig::with_sizes(&PHI3, sizes).with_rope(|rope| rope.theta = theta);
    ModelConfig { vocab_size, ..config }
}
