//! Models of which one part is a language model of a family here, such as vision-language models.

use super::HfConfig;
use crate::families::{ModelError, listed};
use serde_json::{Map, Value, json};

/// A model around a language model, with the constants that transformers uses for it.
struct Wrapper {
    model_type: &'static str,
    class: &'static str,
    /// Names of the language model in `text_config`, with its `model_type`. The first one may be left out.
    text: &'static [(&'static str, &'static str)],
    /// Numbers that `text_config` may leave out.
    defaults: &'static [(&'static str, usize)],
    /// Whether the head is tied to the embedding if the file does not say so.
    is_tied: bool,
}

const WRAPPERS: [Wrapper; 5] = [
    Wrapper {
        model_type: "gemma3",
        class: "Gemma3ForConditionalGeneration",
        text: &[("gemma3_text", "gemma3_text")],
        defaults: &[
            ("vocab_size", 262_208),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 26),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
        ],
        is_tied: true,
    },
    Wrapper {
        model_type: "gemma4",
        class: "Gemma4ForConditionalGeneration",
        text: &[("gemma4_text", "gemma4_text")],
        defaults: &[
            ("vocab_size", 262_144),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 30),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
        ],
        is_tied: true,
    },
    Wrapper {
        model_type: "mistral3",
        class: "Mistral3ForConditionalGeneration",
        text: &[("mistral", "mistral"), ("ministral3", "ministral3")],
        defaults: &[],
        is_tied: true,
    },
    Wrapper {
        model_type: "qwen3_vl",
        class: "Qwen3VLForConditionalGeneration",
        text: &[("qwen3_vl_text", "qwen3"), ("qwen3", "qwen3")],
        defaults: &[("head_dim", 128), ("rope_theta", 500_000)],
        is_tied: false,
    },
    Wrapper {
        model_type: "qwen3_5",
        class: "Qwen3_5ForConditionalGeneration",
        text: &[("qwen3_5_text", "qwen3_5_text")],
        defaults: &[
            ("vocab_size", 248_320),
            ("hidden_size", 4096),
            ("intermediate_size", 12288),
            ("num_hidden_layers", 32),
            ("num_attention_heads", 16),
            ("num_key_value_heads", 4),
        ],
        is_tied: false,
    },
];

/// The `config.json` of the language model within a larger model, with the class of the latter; `None` if the file is that of
/// a language model.
///
/// # Errors
/// A known model without a language model of the family that it has.
pub(crate) fn language_model(
    origin: &str,
    json: &Value,
) -> Result<Option<(Value, &'static str)>, ModelError> {
    let file = HfConfig::new(origin, json);
    let model_type = json.get("model_type").and_then(Value::as_str);
    let Some(wrapper) = WRAPPERS.iter().find(|wrapper| model_type == Some(wrapper.model_type)) else {
        return Ok(None);
    };
    if file.get("quantization_config").is_some() {
        return Err(file.error("quantization_config", "this version loads f32, bf16 and f16"));
    }
    let text = file.get("text_config").and_then(Value::as_object);
    let text = text.ok_or_else(|| file.error("text_config", "it must describe the language model"))?;
    let known = match text.get("model_type") {
        None => wrapper.text.first(),
        Some(name) => wrapper.text.iter().find(|(known, _)| name == known),
    };
    let Some((_, text_type)) = known else {
        let known = listed(wrapper.text.iter().map(|(known, _)| format!("{known:?}")), "or");
        let expected = format!("this version trains a language model of type {known} in it");
        return Err(file.error("text_config", &expected));
    };
    let mut text: Map<String, Value> = text.clone();
    text.remove("architectures");
    text.insert("model_type".to_owned(), json!(text_type));
    for (key, size) in wrapper.defaults {
        text.entry(*key).or_insert(json!(size));
    }
    // That of the whole model counts.
    let is_tied = file.get("tie_word_embeddings").cloned().unwrap_or(json!(wrapper.is_tied));
    text.insert("tie_word_embeddings".to_owned(), is_tied);
    Ok(Some((Value::Object(text), wrapper.class)))
}

/// Where a larger model keeps the tensors of its language model; and the published files of GPT-2, which are those of the
/// model without its head.
const PREFIXES: [(&str, &str); 6] = [
    ("model.language_model.", "model."),
    ("language_model.", ""),
    ("wte.", "transformer.wte."),
    ("wpe.", "transformer.wpe."),
    ("h.", "transformer.h."),
    ("ln_f.", "transformer.ln_f."),
];

/// The name of a tensor in its language model alone.
pub(crate) fn language_model_name(stored: &str) -> String {
    let rename = |(prefix, own): (&str, &str)| Some(format!("{own}{}", stored.strip_prefix(prefix)?));
    PREFIXES.into_iter().find_map(rename).unwrap_or_else(|| stored.to_owned())
}
