//! Gemma 1 and 3.

#[expect(clippy::module_inception, reason = "the first model has the family's name")]
mod gemma;
mod gemma3;

pub(super) use gemma::GEMMA;
pub(super) use gemma3::GEMMA3;

use super::{ModelConfig, Multipliers};

/// PyTorch's name of the approximate GELU.
const ACTIVATION: &str = "gelu_pytorch_tanh";

/// Sets the constants of all Gemma models: the norms' offset of 1, and √hidden_size as the factor on the embedding.
fn with_constants(config: ModelConfig) -> ModelConfig {
    let embedding = (config.hidden_size as f64).sqrt();
    ModelConfig {
        norm_offset: 1.0,
        multipliers: Multipliers { embedding, ..Multipliers::default() },
        ..config
    }
}
