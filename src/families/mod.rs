//! Model families. Each has a folder that reads its `config.json`, composes its layers of the modules of
//! [`nn`](crate::nn), and knows the shapes of its published models. Nothing else asks which family a model is of.
//!
//! - [`ModelConfig`]: the description of a model.
//! - [`FAMILIES`]: the registry.
//! - [`HfConfig`]: access to a `config.json`, with diagnostics.
//! - [`preset`], [`shape`]: descriptions by name.

mod checks;
mod config;
mod decoder_layer;
mod error;
mod hf;
mod known_models;
mod latent;
mod preset;
mod read;
#[cfg(test)]
pub(crate) mod tests;

mod cohere;
mod deepseek;
mod ernie;
mod exaone4;
mod gemma;
mod glm;
mod gpt;
mod granite;
mod kimi;
mod lfm2;
mod llama;
mod minicpm3;
mod mistral;
mod nemotron;
mod olmo;
mod phi;
mod qwen;
mod seed_oss;
mod smollm3;
mod stablelm;
mod youtu;

/// The families, by `model_type`.
pub static FAMILIES: &[&Family] = &[
    &llama::LLAMA,
    &llama::LLAMA4,
    &mistral::MISTRAL,
    &mistral::MINISTRAL,
    &mistral::MINISTRAL3,
    &qwen::QWEN2,
    &qwen::QWEN3,
    &qwen::QWEN3_5,
    &qwen::QWEN3_NEXT,
    &gemma::GEMMA,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &gemma::GEMMA4,
    &granite::GRANITE,
    &granite::GRANITE_HYBRID,
    &olmo::OLMO2,
    &olmo::OLMO3,
    &phi::PHI,
    &phi::PHI3,
    &smollm3::SMOLLM3,
    &exaone4::EXAONE4,
    &seed_oss::SEED_OSS,
    &glm::GLM,
    &glm::GLM4,
    &cohere::COHERE,
    &cohere::COHERE2,
    &ernie::ERNIE4_5,
    &gpt::GPT2,
    &gpt::GPTJ,
    &gpt::GPT_NEOX,
    &gpt::STARCODER2,
    &nemotron::NEMOTRON,
    &nemotron::NEMOTRON_H,
    &stablelm::STABLELM,
    &lfm2::LFM2,
    &deepseek::DEEPSEEK_V2,
    &deepseek::DEEPSEEK_V3,
    &youtu::YOUTU,
    &minicpm3::MINICPM3,
    &kimi::KIMI_LINEAR,
];

pub use config::{Family, KnownModel, ModelConfig, ModelNames, Multipliers, Sizes};
pub use decoder_layer::{DecoderLayer, DecoderParts, ParallelDecoderLayer, SingleBranchLayer};
pub use error::ModelError;
pub(crate) use hf::{HfConfig, language_model, language_model_name};
pub use known_models::{known_models, max_positions, shape};
pub use preset::{PRESETS, preset};
pub(crate) use read::read_config;

/// Returns the family of a `model_type`.
pub fn family(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| family.model_type == model_type)
}

/// Names as `a, b or c`.
fn listed(names: impl Iterator<Item = impl ToString>, conjunction: &str) -> String {
    let mut names: Vec<String> = names.map(|name| name.to_string()).collect();
    let last = names.pop().unwrap_or_default();
    format!("{} {conjunction} {last}", names.join(", "))
}
