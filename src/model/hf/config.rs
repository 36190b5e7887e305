//! Hugging Face's `config.json`.

use crate::model::{Architecture, LlamaConfig, ModelError};
use serde_json::Value;

/// Typed access to a Hugging Face `config.json`.
pub(super) struct HfConfig {
    /// The file, for errors.
    pub(super) origin: String,
    /// Its content.
    pub(super) value: Value,
}

impl HfConfig {
    /// Returns the description, if this version supports the model, and notes for the user.
    pub(super) fn llama(&self) -> Result<(LlamaConfig, Vec<String>), ModelError> {
        let architecture = self.architecture()?;
        self.refuse_unsupported()?;
        let notes = self.check_fields(architecture)?;
        let num_heads = self.size("num_attention_heads")?;
        let hidden_size = self.size("hidden_size")?;
        // If they are absent, transformers uses defaults that depend on the family: a function of the other
        // sizes, or the sizes of the family's first model.
        let num_kv_heads = match self.optional_size("num_key_value_heads")? {
            None if architecture != Architecture::Llama
                && self.value.get("num_key_value_heads").is_none() =>
            {
                return Err(self.error("num_key_value_heads", "it must be given for this model_type"));
            }
            given => given.unwrap_or(num_heads),
        };
        let head_dim = match self.optional_size("head_dim")? {
            None if architecture == Architecture::Qwen3 => {
                return Err(self.error("head_dim", "it must be given for this model_type"));
            }
            given => given.unwrap_or(hidden_size / num_heads.max(1)),
        };
        let (rope_theta, rope_scaling) = self.rope()?;
        let config = LlamaConfig {
            architecture,
            vocab_size: self.size("vocab_size")?,
            hidden_size,
            intermediate_size: self.size("intermediate_size")?,
            num_layers: self.size("num_hidden_layers")?,
            num_heads,
            num_kv_heads,
            head_dim,
            rope_theta,
            rope_scaling,
            rms_norm_eps: self.number("rms_norm_eps", 1e-6)?,
            initializer_range: self.number("initializer_range", 0.02)?,
            tie_word_embeddings: self.flag("tie_word_embeddings")?,
        };
        Ok((config, notes))
    }

    /// The family by `model_type`; `architectures` must not contradict it.
    fn architecture(&self) -> Result<Architecture, ModelError> {
        let architecture = match self.get("model_type").and_then(Value::as_str) {
            Some("llama") => Architecture::Llama,
            Some("mistral") => Architecture::Mistral { sliding_window: self.mistral_window()? },
            Some("qwen2") => Architecture::Qwen2,
            Some("qwen3") => Architecture::Qwen3,
            _ => {
                let known = "\"llama\", \"mistral\", \"qwen2\" or \"qwen3\"";
                let expected = format!("this version loads {known}, and no other family");
                return Err(self.error("model_type", &expected));
            }
        };
        let (_, class) = architecture.hf_names();
        let classes = self.get("architectures").and_then(Value::as_array);
        if classes.is_some_and(|classes| !classes.iter().any(|known| known == class)) {
            return Err(self.error("architectures", &format!("this version computes {class:?} of this type")));
        }
        Ok(architecture)
    }

    /// The sliding window: absent means that of Mistral 7B, `null` means none.
    fn mistral_window(&self) -> Result<Option<usize>, ModelError> {
        match self.value.get("sliding_window") {
            None => Ok(Some(4096)),
            Some(_) => self.optional_size("sliding_window"),
        }
    }

    /// Refuses models that would load but compute something else.
    fn refuse_unsupported(&self) -> Result<(), ModelError> {
        if self.get("hidden_act").is_some_and(|act| act != "silu") {
            return Err(self.error("hidden_act", "this version computes \"silu\""));
        }
        for key in ["attention_bias", "mlp_bias"] {
            if self.flag(key)? {
                return Err(self.error(key, "this version has no biases but those of Qwen2"));
            }
        }
        let model_type = self.get("model_type").and_then(Value::as_str);
        if model_type == Some("llama") && self.get("sliding_window").is_some() {
            let expected = "Llama attends to the whole document: leave it out";
            return Err(self.error("sliding_window", expected));
        }
        // Qwen2 and Qwen3 configs have a window even if they do not use it.
        if model_type != Some("mistral") && self.flag("use_sliding_window")? {
            let expected = "this version has sliding windows for Mistral only";
            return Err(self.error("use_sliding_window", expected));
        }
        let types = self.get("layer_types").and_then(Value::as_array);
        let slides = matches!(model_type, Some("mistral"));
        if types.is_some_and(|types| slides || types.iter().any(|kind| kind != "full_attention")) {
            return Err(self.error("layer_types", "this version has the same attention in every layer"));
        }
        Ok(())
    }

    /// The value of a key, unless absent or `null`.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn error(&self, key: &'static str, expected: &str) -> ModelError {
        let got = self.value.get(key).map_or("missing".to_owned(), Value::to_string);
        ModelError::Config { origin: self.origin.clone(), key, got, expected: expected.to_owned() }
    }

    fn optional_size(&self, key: &'static str) -> Result<Option<usize>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(size) => Ok(Some(size as usize)),
                None => Err(self.error(key, "it must be a positive integer")),
            },
        }
    }

    pub(super) fn size(&self, key: &'static str) -> Result<usize, ModelError> {
        self.optional_size(key)?.ok_or_else(|| self.error(key, "it must be a positive integer"))
    }

    pub(super) fn number(&self, key: &'static str, default: f64) -> Result<f64, ModelError> {
        match self.value.get(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| self.error(key, "it must be a number")),
        }
    }

    fn flag(&self, key: &'static str) -> Result<bool, ModelError> {
        match self.value.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.error(key, "it must be true or false")),
        }
    }
}
