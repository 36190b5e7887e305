//! Qwen2 and 2.5: Llama with biases on the projections of queries, keys and values, and windows in the upper layers.

use super::{with_used_windows, write_used_windows};
use crate::families::{DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames};
use crate::nn::AttentionConfig;

pub(in crate::families) static QWEN2: Family = Family {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write: write_used_windows,
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[KnownModel::new("Qwen2.5-7B", 7_615_616_512, 131_072, qwen2_5_7b)],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.require_kv_heads()?;
    let layer = AttentionConfig { qkv_bias: true, ..file.attention()? };
    with_used_windows(file, file.decoder(&QWEN2, layer, 1e-6)?)
}

fn qwen2_5_7b() -> ModelConfig {
    let config = ModelConfig::with_sizes(&QWEN2, [3584, 28, 28, 4, 18944]);
    let config = config.with_attention(|layer| layer.qkv_bias = true);
    let config = config.with_rope(|rope| rope.theta = 1_000_000.0);
    ModelConfig { vocab_size: 152_064, rms_norm_eps: 1e-6, ..config }
}
