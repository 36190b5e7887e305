//! Small models by name.

use super::llama::LLAMA;
use super::{ModelConfig, ModelError};

/// Names that [`preset`] accepts.
pub const PRESETS: [&str; 4] = ["nano", "tiny", "small", "base"];

/// Returns a byte-level model by name. Size: hidden × layers × query heads / KV heads.
///
/// | name | size | parameters |
/// |---|---|---|
/// | `nano` | 64 × 2 × 4/2 | 0.1 M |
/// | `tiny` | 128 × 2 × 8/4 | 0.4 M |
/// | `small` | 256 × 4 × 8/8 | 3.3 M |
/// | `base` | 512 × 6 × 8/8 | 19 M |
///
/// # Errors
/// An unknown name; the error lists the known ones.
pub fn preset(name: &str) -> Result<ModelConfig, ModelError> {
    let sizes = match name {
        "nano" => [64, 2, 4, 2, 172],
        "tiny" => [128, 2, 8, 4, 344],
        "small" => [256, 4, 8, 8, 688],
        "base" => [512, 6, 8, 8, 1376],
        _ => return Err(ModelError::UnknownPreset { name: name.to_owned(), presets: PRESETS.to_vec() }),
    };
    Ok(ModelConfig { vocab_size: 256, ..ModelConfig::with_sizes(&LLAMA, sizes) })
}
