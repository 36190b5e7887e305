//! OLMo 2: norms after the modules instead of before, and over all heads of queries and keys (arXiv 2501.00656).

use super::heads;
use crate::families::{
    DecoderLayer, DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use crate::nn::{AttentionConfig, QkNorm};

pub(in crate::families) static OLMO2: Family = Family {
    model_type: "olmo2",
    class: "Olmo2ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write: |_, _| {},
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, DecoderParts::NORMS_AFTER)),
    models: &[
        KnownModel::new("OLMo-2-0425-1B", 1_484_916_736, 4096, || published([2048, 16, 16, 16, 8192])),
        KnownModel::new("OLMo-2-1124-7B", 7_298_617_344, 4096, || published([4096, 32, 32, 32, 11008])),
    ],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    let config = file.decoder(&OLMO2, AttentionConfig { rope: Some(file.rope()?), ..heads(file)? }, 1e-5)?;
    file.check_full_attention(&config)?;
    Ok(config)
}

fn published(sizes: Sizes) -> ModelConfig {
    let config = ModelConfig::with_sizes(&OLMO2, sizes)
        .with_attention(|layer| layer.qk_norm = Some(QkNorm::AllHeads))
        .with_rope(|rope| rope.theta = 500_000.0);
    ModelConfig { vocab_size: 100_352, rms_norm_eps: 1e-6, ..config }
}
