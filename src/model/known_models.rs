//! Shapes of published models, for plans. They have no weights.

use super::{Architecture, LlamaConfig, ModelError, PRESETS, preset};
use ulysses_kernels::rope::Scaling;

/// Names that [`shape`] accepts in addition to the [`PRESETS`].
pub const KNOWN_MODELS: [&str; 18] = [
    "llama2-7b",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "Llama-3.1-8B",
    "Llama-3.1-70B",
    "Llama-3.1-405B",
    "Llama-3.2-1B",
    "Llama-3.2-3B",
    "Llama-3.3-70B",
    "Mistral-7B-v0.3",
    "Qwen3-0.6B",
    "Qwen3-1.7B",
    "Qwen3-4B",
    "Qwen3-8B",
    "Qwen3-14B",
    "Qwen3-32B",
    "Qwen2.5-7B",
];

/// Published models that this version does not support: the beginning of the name, and the reason.
const UNSUPPORTED: [(&str, &str); 9] = [
    ("gpt-oss", "it has a mixture of experts and attention sinks"),
    ("mixtral", "it has a mixture of experts"),
    ("llama-4", "it has a mixture of experts"),
    ("qwen3-30b-a3b", "it has a mixture of experts"),
    ("qwen3-235b-a22b", "it has a mixture of experts"),
    ("deepseek-v", "it has a mixture of experts and latent attention"),
    ("deepseek-r1", "it has a mixture of experts and latent attention"),
    ("gemma", "it has other norms, another activation, and windows in some layers only"),
    ("phi-", "it is not among the families llama, mistral, qwen2 and qwen3"),
];

/// Returns the shape of a published model or a preset by name. Size: hidden × layers × query heads / KV
/// heads.
///
/// | name | size | intermediate | vocabulary |
/// |---|---|---|---|
/// | `llama2-7b` | 4096 × 32 × 32/32 | 11008 | 32000 |
/// | `llama3-8b`, `Llama-3.1-8B` | 4096 × 32 × 32/8 | 14336 | 128256 |
/// | `llama3-70b`, `Llama-3.1-70B`, `Llama-3.3-70B` | 8192 × 80 × 64/8 | 28672 | 128256 |
/// | `llama3-405b`, `Llama-3.1-405B` | 16384 × 126 × 128/8 | 53248 | 128256 |
/// | `Llama-3.2-1B` | 2048 × 16 × 32/8 | 8192 | 128256, tied |
/// | `Llama-3.2-3B` | 3072 × 28 × 24/8 | 8192 | 128256, tied |
/// | `Mistral-7B-v0.3` | 4096 × 32 × 32/8 | 14336 | 32768 |
/// | `Qwen2.5-7B` | 3584 × 28 × 28/4 | 18944 | 152064 |
/// | `Qwen3-0.6B` | 1024 × 28 × 16/8 | 3072 | 151936, tied |
/// | `Qwen3-1.7B` | 2048 × 28 × 16/8 | 6144 | 151936, tied |
/// | `Qwen3-4B` | 2560 × 36 × 32/8 | 9728 | 151936, tied |
/// | `Qwen3-8B` | 4096 × 36 × 32/8 | 12288 | 151936 |
/// | `Qwen3-14B` | 5120 × 40 × 40/8 | 17408 | 151936 |
/// | `Qwen3-32B` | 5120 × 64 × 64/8 | 25600 | 151936 |
///
/// The values are those of the models' `config.json`. A name may have its organization (`Qwen/Qwen3-8B`) and the ending
/// `-Instruct`, in any case.
///
/// # Errors
/// An unknown name; the error lists the known ones. A published model of an unsupported family; the error says why.
pub fn shape(name: &str) -> Result<LlamaConfig, ModelError> {
    if let Some(known) = known(name) {
        return Ok(known.config);
    }
    if PRESETS.contains(&name) {
        return preset(name);
    }
    let plain = plain(name);
    if let Some((_, reason)) = UNSUPPORTED.iter().find(|(begin, _)| plain.starts_with(begin)) {
        return Err(ModelError::UnsupportedModel { name: name.to_owned(), reason });
    }
    let presets = PRESETS.into_iter().chain(KNOWN_MODELS).collect();
    Err(ModelError::UnknownPreset { name: name.to_owned(), presets })
}

/// Returns the longest sequence that a published model is made for, `max_position_embeddings`; `None` for other names.
pub fn max_positions(name: &str) -> Option<usize> {
    known(name).map(|known| known.max_positions)
}

/// A published model.
struct KnownModel {
    config: LlamaConfig,
    /// `max_position_embeddings`.
    max_positions: usize,
}

/// Returns a name without organization and `-instruct`, in lower case.
fn plain(name: &str) -> String {
    let model = name.rsplit('/').next().unwrap_or(name).to_lowercase();
    model.strip_suffix("-instruct").unwrap_or(&model).to_owned()
}

fn known(name: &str) -> Option<KnownModel> {
    let name = plain(name);
    let (family, sizes): (fn(Sizes) -> KnownModel, Sizes) = match name.as_str() {
        "llama2-7b" => (llama2, (4096, 32, 32, 32, 11008)),
        "llama3-8b" => (llama3, (4096, 32, 32, 8, 14336)),
        "llama3-70b" => (llama3, (8192, 80, 64, 8, 28672)),
        "llama3-405b" => (llama3, (16384, 126, 128, 8, 53248)),
        "llama-3.1-8b" => (llama3_1, (4096, 32, 32, 8, 14336)),
        "llama-3.1-70b" | "llama-3.3-70b" => (llama3_1, (8192, 80, 64, 8, 28672)),
        "llama-3.1-405b" => (llama3_1, (16384, 126, 128, 8, 53248)),
        "llama-3.2-1b" => (llama3_2, (2048, 16, 32, 8, 8192)),
        "llama-3.2-3b" => (llama3_2, (3072, 28, 24, 8, 8192)),
        "mistral-7b-v0.3" => (mistral, (4096, 32, 32, 8, 14336)),
        "qwen2.5-7b" => (qwen2, (3584, 28, 28, 4, 18944)),
        "qwen3-0.6b" => (qwen3_tied, (1024, 28, 16, 8, 3072)),
        "qwen3-1.7b" => (qwen3_tied, (2048, 28, 16, 8, 6144)),
        "qwen3-4b" => (qwen3_tied, (2560, 36, 32, 8, 9728)),
        "qwen3-8b" => (qwen3, (4096, 36, 32, 8, 12288)),
        "qwen3-14b" => (qwen3, (5120, 40, 40, 8, 17408)),
        "qwen3-32b" => (qwen3, (5120, 64, 64, 8, 25600)),
        _ => return None,
    };
    Some(family(sizes))
}

/// Hidden size, layers, query heads, KV heads, intermediate size.
type Sizes = (usize, usize, usize, usize, usize);

fn llama2((hidden_size, num_layers, num_heads, num_kv_heads, intermediate_size): Sizes) -> KnownModel {
    let config = LlamaConfig {
        architecture: Architecture::Llama,
        vocab_size: 32_000,
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
    };
    KnownModel { config, max_positions: 4096 }
}

fn llama3(sizes: Sizes) -> KnownModel {
    let config = LlamaConfig { vocab_size: 128_256, rope_theta: 500_000.0, ..llama2(sizes).config };
    KnownModel { config, max_positions: 8192 }
}

fn llama3_1(sizes: Sizes) -> KnownModel {
    let config = LlamaConfig { rope_scaling: llama3_scaling(8.0), ..llama3(sizes).config };
    KnownModel { config, max_positions: 131_072 }
}

fn llama3_2(sizes: Sizes) -> KnownModel {
    let rope_scaling = llama3_scaling(32.0);
    let config = LlamaConfig { rope_scaling, tie_word_embeddings: true, ..llama3(sizes).config };
    KnownModel { config, max_positions: 131_072 }
}

fn llama3_scaling(factor: f64) -> Scaling {
    Scaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 8192 }
}

fn mistral(sizes: Sizes) -> KnownModel {
    let architecture = Architecture::Mistral { sliding_window: None };
    let config =
        LlamaConfig { architecture, vocab_size: 32_768, rope_theta: 1_000_000.0, ..llama2(sizes).config };
    KnownModel { config, max_positions: 32_768 }
}

fn qwen2(sizes: Sizes) -> KnownModel {
    let architecture = Architecture::Qwen2;
    let config = LlamaConfig { architecture, vocab_size: 152_064, ..qwen3(sizes).config };
    KnownModel { config, max_positions: 131_072 }
}

fn qwen3(sizes: Sizes) -> KnownModel {
    let config = LlamaConfig {
        architecture: Architecture::Qwen3,
        vocab_size: 151_936,
        head_dim: 128,
        rope_theta: 1_000_000.0,
        rms_norm_eps: 1e-6,
        ..llama2(sizes).config
    };
    KnownModel { config, max_positions: 40_960 }
}

fn qwen3_tied(sizes: Sizes) -> KnownModel {
    let KnownModel { config, max_positions } = qwen3(sizes);
    KnownModel { config: LlamaConfig { tie_word_embeddings: true, ..config }, max_positions }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_have_as_many_parameters_as_the_models_are_known_to() {
        let parameters = KNOWN_MODELS.map(|name| shape(name).unwrap().num_parameters());
        let expected = [
            6_738_415_616,
            8_030_261_248,
            70_553_706_496,
            405_853_388_800,
            8_030_261_248,
            70_553_706_496,
            405_853_388_800,
            1_235_814_400,
            3_212_749_824,
            70_553_706_496,
            7_248_023_552,
            596_049_920,
            1_720_574_976,
            4_022_468_096,
            8_190_735_360,
            14_768_307_200,
            32_762_123_264,
            7_615_616_512,
        ];
        assert_eq!(parameters, expected);
        KNOWN_MODELS.iter().for_each(|name| shape(name).unwrap().validate(name).unwrap());
    }

    #[test]
    fn names_are_those_of_hugging_face() {
        for name in ["Qwen3-8B", "Qwen/Qwen3-8B", "qwen3-8b"] {
            assert_eq!(shape(name).unwrap(), shape("Qwen3-8B").unwrap());
        }
        let instruct = shape("meta-llama/Llama-3.2-1B-Instruct").unwrap();
        assert!(instruct.tie_word_embeddings && instruct.head_dim == 64);
        assert_eq!((max_positions("Qwen/Qwen3-8B"), max_positions("nano")), (Some(40_960), None));
    }

    #[test]
    fn presets_have_shapes_and_unknown_names_are_answered_with_the_known_ones() {
        assert_eq!(shape("nano").unwrap(), preset("nano").unwrap());
        let message = shape("llama9").unwrap_err().to_string();
        assert!(message.contains("base") && message.contains("llama3-405b"), "{message}");
        let message = shape("openai/gpt-oss-20b").unwrap_err().to_string();
        assert!(message.contains("`openai/gpt-oss-20b`") && message.contains("attention sinks"), "{message}");
    }
}
