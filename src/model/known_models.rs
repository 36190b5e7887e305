//! Shapes of published models, for plans. They have no weights.

use super::{Architecture, LlamaConfig, ModelError, PRESETS, preset};
use ulysses_kernels::rope::Scaling;

/// Names that [`shape`] accepts in addition to the [`PRESETS`].
pub const KNOWN_MODELS: [&str; 4] = ["llama2-7b", "llama3-8b", "llama3-70b", "llama3-405b"];

/// Returns the shape of a published model or a preset by name. Size: hidden × layers × query heads / KV
/// heads.
///
/// | name | size | intermediate | vocabulary |
/// |---|---|---|---|
/// | `llama2-7b` | 4096 × 32 × 32/32 | 11008 | 32000 |
/// | `llama3-8b` | 4096 × 32 × 32/8 | 14336 | 128256 |
/// | `llama3-70b` | 8192 × 80 × 64/8 | 28672 | 128256 |
/// | `llama3-405b` | 16384 × 126 × 128/8 | 53248 | 128256 |
///
/// The values are those of the models' `config.json` (arXiv 2307.09288, 2407.21783).
///
/// # Errors
/// An unknown name; the error lists the known ones.
pub fn shape(name: &str) -> Result<LlamaConfig, ModelError> {
    let (hidden_size, num_layers, num_heads, num_kv_heads, intermediate_size) = match name {
        "llama2-7b" => (4096, 32, 32, 32, 11008),
        "llama3-8b" => (4096, 32, 32, 8, 14336),
        "llama3-70b" => (8192, 80, 64, 8, 28672),
        "llama3-405b" => (16384, 126, 128, 8, 53248),
        _ if PRESETS.contains(&name) => return preset(name),
        _ => {
            let presets = PRESETS.into_iter().chain(KNOWN_MODELS).collect();
            return Err(ModelError::UnknownPreset { name: name.to_owned(), presets });
        }
    };
    let is_second = name.starts_with("llama2");
    Ok(LlamaConfig {
        architecture: Architecture::Llama,
        vocab_size: if is_second { 32_000 } else { 128_256 },
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim: hidden_size / num_heads,
        rope_theta: if is_second { 10_000.0 } else { 500_000.0 },
        rope_scaling: Scaling::None,
        rms_norm_eps: 1e-5,
        initializer_range: 0.02,
        tie_word_embeddings: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_have_as_many_parameters_as_the_models_are_known_to() {
        let parameters = KNOWN_MODELS.map(|name| shape(name).unwrap().num_parameters());
        assert_eq!(parameters, [6_738_415_616, 8_030_261_248, 70_553_706_496, 405_853_388_800]);
    }

    #[test]
    fn presets_have_shapes_and_unknown_names_are_answered_with_the_known_ones() {
        assert_eq!(shape("nano").unwrap(), preset("nano").unwrap());
        let message = shape("llama9").unwrap_err().to_string();
        assert!(message.contains("base") && message.contains("llama3-405b"), "{message}");
    }
}
