//! Youtu-LLM (arXiv 2512.24618): Llama with the latent attention of DeepSeek-V3.

use super::latent;
use super::{DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes};
use crate::nn::LatentConfig;
use serde_json::{Value, json};
use ulysses_kernels::rope::Rope;

pub(super) static YOUTU: Family = Family {
    model_type: "youtu",
    class: "YoutuForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[KnownModel::new("Youtu-LLM-2B", 1_961_560_064, 131_072, || {
        published([2048, 32, 16, 16, 6144])
    })],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", "silu")?;
    file.require_kv_heads()?;
    // Of initial values.
    file.accept(&["embedding_initializer_range"]);
    let rope = latent::interleaved(file, file.rope()?)?;
    let layer = latent::read(file, Some(rope), file.size("v_head_dim")?)?;
    let mut config = file.decoder(&YOUTU, layer, 1e-6)?;
    if file.get("initializer_range").is_none() {
        config.initializer_range = 2.0 / (5.0 * config.hidden_size as f64).sqrt();
    }
    Ok(file.tied_by_default(config))
}

fn write(config: &ModelConfig, json: &mut Value) {
    latent::write(config, json);
    json["rope_interleave"] = json!(config.rope().is_none_or(|rope| rope.interleaved));
}

fn published(sizes: Sizes) -> ModelConfig {
    let latent = LatentConfig {
        q_rank: Some(1536),
        kv_rank: 512,
        rope_head_dim: 64,
        value_head_dim: 128,
        mscale_all_dim: 0.0,
    };
    let rope = Rope { interleaved: true, ..1_600_000.0.into() };
    let config = ModelConfig::with_sizes(&YOUTU, sizes).with_attention(|layer| {
        (layer.head_dim, layer.latent, layer.rope) = (192, Some(latent), Some(rope));
    });
    ModelConfig { vocab_size: 128_256, rms_norm_eps: 1e-6, tie_word_embeddings: true, ..config }
}
