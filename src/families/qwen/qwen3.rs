//! Qwen3: Llama with an RMSNorm over every head of the queries and keys, before the rotary embedding.

use super::{with_used_windows, write_used_windows};
use crate::families::read::MUST_BE_GIVEN;
use crate::families::{
    DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use crate::nn::{AttentionConfig, QkNorm};

pub(in crate::families) static QWEN3: Family = Family {
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write: write_used_windows,
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[
        KnownModel::new("Qwen3-0.6B", 596_049_920, 40_960, || tied([1024, 28, 16, 8, 3072])),
        KnownModel::new("Qwen3-1.7B", 1_720_574_976, 40_960, || tied([2048, 28, 16, 8, 6144])),
        KnownModel::new("Qwen3-4B", 4_022_468_096, 40_960, || tied([2560, 36, 32, 8, 9728])),
        KnownModel::new("Qwen3-8B", 8_190_735_360, 40_960, || untied([4096, 36, 32, 8, 12288])),
        KnownModel::new("Qwen3-14B", 14_768_307_200, 40_960, || untied([5120, 40, 40, 8, 17408])),
        KnownModel::new("Qwen3-32B", 32_762_123_264, 40_960, || untied([5120, 64, 64, 8, 25600])),
    ],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.require_kv_heads()?;
    if file.get("head_dim").is_none() {
        return Err(file.error("head_dim", MUST_BE_GIVEN));
    }
    let layer = AttentionConfig { qk_norm: Some(QkNorm::Head), ..file.attention()? };
    with_used_windows(file, file.decoder(&QWEN3, layer, 1e-6)?)
}

fn untied(sizes: Sizes) -> ModelConfig {
    let config = ModelConfig::with_sizes(&QWEN3, sizes)
        .with_attention(|layer| (layer.head_dim, layer.qk_norm) = (128, Some(QkNorm::Head)))
        .with_rope(|rope| rope.theta = 1_000_000.0);
    ModelConfig { vocab_size: 151_936, rms_norm_eps: 1e-6, ..config }
}

fn tied(sizes: Sizes) -> ModelConfig {
    ModelConfig { tie_word_embeddings: true, ..untied(sizes) }
}
