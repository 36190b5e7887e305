//! Qwen2 and 2.5: Llama with biases on the projections of queries, keys and values.

use super::{DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError};

pub(super) static QWEN2: Family = Family {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    read,
    write: |_, _| {},
    block: |config, index| Box::new(DecoderLayer::new(config, index).with_qkv_bias()),
    models: &[KnownModel::new("Qwen2.5-7B", 7_615_616_512, 131_072, qwen2_5_7b)],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.check_full_attention()?;
    file.require_kv_heads()?;
    file.decoder(&QWEN2, file.attention()?)
}

fn qwen2_5_7b() -> ModelConfig {
    let config = ModelConfig::with_sizes(&QWEN2, [3584, 28, 28, 4, 18944]);
    let config = config.with_attention(|layer| layer.rope.theta = 1_000_000.0);
    ModelConfig { vocab_size: 152_064, rms_norm_eps: 1e-6, ..config }
}
