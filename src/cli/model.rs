//! `--model`: a preset by name or a directory in Hugging Face's layout.

use super::{Failure, OrFail};
use std::path::Path;
use ulysses::model::{HfWeights, LlamaConfig, PRESETS, RandomWeights, WeightSource, preset};

/// A model's description and where its weights come from.
pub(super) struct ModelSource {
    pub(super) config: LlamaConfig,
    pub(super) weights: Box<dyn WeightSource>,
}

/// Presets start from random weights made from `seed` and take the tokenizer's vocabulary;
/// a directory brings weights and vocabulary.
pub(super) fn open(model: &str, seed: u64, vocab_size: usize) -> Result<ModelSource, Failure> {
    let dir = Path::new(model);
    if PRESETS.contains(&model) || !dir.exists() {
        let config = LlamaConfig { vocab_size, ..preset(model).or_usage()? };
        return Ok(ModelSource { config, weights: Box::new(RandomWeights { seed }) });
    }
    let config = LlamaConfig::from_hf_dir(dir).or_usage()?;
    let weights = Box::new(HfWeights::open(dir).or_usage()?);
    Ok(ModelSource { config, weights })
}
