//! Shapes of published models, for plans. They have no weights.

use super::{FAMILIES, KnownModel, ModelConfig, ModelError, PRESETS, preset};

/// Published models that this version does not support: the beginning of the name, and the reason.
const UNSUPPORTED: [(&str, &str); 14] = [
    ("gpt-oss", "it has a mixture of experts"),
    ("mixtral", "it has a mixture of experts"),
    ("llama-4", "it has a mixture of experts"),
    ("qwen3-30b-a3b", "it has a mixture of experts"),
    ("qwen3-235b-a22b", "it has a mixture of experts"),
    ("qwen3-next", "it has a mixture of experts"),
    ("kimi-linear", "it has a mixture of experts"),
    ("deepseek-v", "it has a mixture of experts"),
    ("deepseek-r1", "it has a mixture of experts"),
    ("gemma-3n", "it has embeddings per layer"),
    ("gemma-4-e2b", "it has embeddings per layer"),
    ("gemma-4-e4b", "it has embeddings per layer"),
    ("gemma-4-26b-a4b", "it has a mixture of experts"),
    ("phi-3.5-moe", "it has a mixture of experts"),
];

/// Returns the shape of a published model or a preset by name.
///
/// The values are those of the models' `config.json`. A name may have its organization (`Qwen/Qwen3-8B`) and an ending for
/// the stage of its training (`-Instruct`, `-it`, `-pt`, `-base`), in any case.
///
/// # Errors
/// An unknown name; the error lists the known ones. A published model of an unsupported family; the error says why.
pub fn shape(name: &str) -> Result<ModelConfig, ModelError> {
    if let Some(known) = known(name) {
        return Ok((known.config)());
    }
    if PRESETS.contains(&name) {
        return preset(name);
    }
    let plain = plain(name);
    if let Some((_, reason)) = UNSUPPORTED.iter().find(|(begin, _)| plain.starts_with(begin)) {
        return Err(ModelError::UnsupportedModel { name: name.to_owned(), reason: (*reason).to_owned() });
    }
    let presets = PRESETS.into_iter().chain(known_models().map(|model| model.name)).collect();
    Err(ModelError::UnknownPreset { name: name.to_owned(), presets })
}

/// Returns the published models whose names [`shape`] accepts in addition to the [`PRESETS`].
pub fn known_models() -> impl Iterator<Item = &'static KnownModel> {
    FAMILIES.iter().flat_map(|family| family.models)
}

/// Returns the longest sequence that a published model is made for, `max_position_embeddings`; `None` for other names.
pub fn max_positions(name: &str) -> Option<usize> {
    known(name).map(|known| known.max_positions)
}

/// Returns a name without organization and stage of training, in lower case.
fn plain(name: &str) -> String {
    let model = name.rsplit('/').next().unwrap_or(name).to_lowercase();
    let stages = ["-instruct", "-it", "-pt", "-base"];
    stages.into_iter().find_map(|stage| model.strip_suffix(stage)).unwrap_or(&model).to_owned()
}

fn known(name: &str) -> Option<&'static KnownModel> {
    let name = plain(name);
    known_models().find(|model| model.name.to_lowercase() == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_have_as_many_parameters_as_the_models_are_known_to() {
        for model in known_models() {
            let config = (model.config)();
            assert_eq!(config.num_parameters(), model.num_parameters, "{}", model.name);
            config.validate(model.name).unwrap();
        }
        assert_eq!(known_models().count(), 79);
    }

    #[test]
    fn names_are_those_of_hugging_face() {
        for name in ["Qwen3-8B", "Qwen/Qwen3-8B", "qwen3-8b"] {
            assert_eq!(shape(name).unwrap(), shape("Qwen3-8B").unwrap());
        }
        let instruct = shape("meta-llama/Llama-3.2-1B-Instruct").unwrap();
        assert!(instruct.tie_word_embeddings && instruct.attention().head_dim == 64);
        assert_eq!((max_positions("Qwen/Qwen3-8B"), max_positions("nano")), (Some(40_960), None));
    }

    #[test]
    fn presets_have_shapes_and_unknown_names_are_answered_with_the_known_ones() {
        assert_eq!(shape("nano").unwrap(), preset("nano").unwrap());
        let message = shape("llama9").unwrap_err().to_string();
        assert!(message.contains("base") && message.contains("llama3-405b"), "{message}");
        assert_eq!(shape("google/gemma-3-1b-it").unwrap(), shape("gemma-3-1b").unwrap());
        for (name, reason) in [
            ("google/gemma-3n-e2b-it", "embeddings per layer"),
            ("microsoft/Phi-3.5-MoE-instruct", "mixture of experts"),
            ("Qwen/Qwen3-Next-80B-A3B-Instruct", "mixture of experts"),
            ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "mixture of experts"),
        ] {
            let message = shape(name).unwrap_err().to_string();
            assert!(message.contains(reason), "{message}");
        }
        let message = shape("openai/gpt-oss-20b").unwrap_err().to_string();
        assert!(
            message.contains("`openai/gpt-oss-20b`") && message.contains("a mixture of experts"),
            "{message}"
        );
    }
}
