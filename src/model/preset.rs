//! Small models by name.

use super::{Architecture, LlamaConfig, ModelError};
use ulysses_kernels::rope::Scaling;

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
pub fn preset(name: &str) -> Result<LlamaConfig, ModelError> {
    let (hidden_size, num_layers, num_heads, num_kv_heads, intermediate_size) = match name {
        "nano" => (64, 2, 4, 2, 172),
        "tiny" => (128, 2, 8, 4, 344),
        "small" => (256, 4, 8, 8, 688),
        "base" => (512, 6, 8, 8, 1376),
        _ => return Err(ModelError::UnknownPreset { name: name.to_owned(), presets: PRESETS.to_vec() }),
    };
    Ok(LlamaConfig {
        architecture: Architecture::Llama,
        vocab_size: 256,
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim: hidden_size / num_heads,
        rope_theta: 10_000.0,
        rope_scaling: Scaling::None,
        rms_norm_eps: 1e-5,
        initializer_range: 0.02,
        tie_word_embeddings: false,
    })
}
