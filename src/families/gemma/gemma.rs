//! Gemma 1: Llama with norms whose weights are around 0, GeGLU, and a scaled embedding (arXiv 2403.08295).

use super::{ACTIVATION, with_constants};
use crate::families::{
    DecoderLayer, DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use serde_json::json;
use ulysses_kernels::glu::Activation;

pub(in crate::families) static GEMMA: Family = Family {
    model_type: "gemma",
    class: "GemmaForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write: |_, json| json["hidden_act"] = json!(ACTIVATION),
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, PARTS)),
    models: &[
        KnownModel::new("gemma-2b", 2_506_172_416, 8192, || published([2048, 18, 8, 1, 16384])),
        KnownModel::new("gemma-7b", 8_537_680_896, 8192, || published([3072, 28, 16, 16, 24576])),
    ],
};

const PARTS: DecoderParts = DecoderParts { activation: Activation::GeluTanh, ..DecoderParts::LLAMA };

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_activation", ACTIVATION)?;
    // The official files say "gelu" and mean the approximation.
    if file.get("hidden_act").is_none_or(|activation| activation != "gelu") {
        file.check_activation("hidden_act", ACTIVATION)?;
    }
    file.check_biases()?;
    file.check_causal()?;
    file.require_kv_heads()?;
    let layer = file.attention_with_head_dim(256)?;
    let config = file.decoder(&GEMMA, layer, 1e-6)?;
    file.check_full_attention(&config)?;
    Ok(with_constants(file.tied_by_default(config)))
}

fn published(sizes: Sizes) -> ModelConfig {
    let config = ModelConfig::with_sizes(&GEMMA, sizes).with_attention(|layer| layer.head_dim = 256);
    with_constants(ModelConfig {
        vocab_size: 256_000,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: true,
        ..config
    })
}
