//! Hugging Face's `config.json`.

use super::{LlamaConfig, ModelError};
use serde_json::Value;

/// Typed access to a Hugging Face `config.json`.
pub(super) struct HfConfig {
    /// The file, for errors.
    pub(super) origin: String,
    /// What it holds.
    pub(super) value: Value,
}

impl HfConfig {
    /// The description, if this version computes such a model.
    pub(super) fn llama(&self) -> Result<LlamaConfig, ModelError> {
        self.refuse_unsupported()?;
        let num_heads = self.size("num_attention_heads")?;
        let hidden_size = self.size("hidden_size")?;
        let rope_theta = match self.value.pointer("/rope_parameters/rope_theta") {
            Some(theta) => theta.as_f64(),
            None => self.value.get("rope_theta").map_or(Some(10_000.0), Value::as_f64),
        };
        Ok(LlamaConfig {
            vocab_size: self.size("vocab_size")?,
            hidden_size,
            intermediate_size: self.size("intermediate_size")?,
            num_layers: self.size("num_hidden_layers")?,
            num_heads,
            num_kv_heads: self.optional_size("num_key_value_heads")?.unwrap_or(num_heads),
            head_dim: self.optional_size("head_dim")?.unwrap_or(hidden_size / num_heads.max(1)),
            rope_theta: rope_theta.ok_or_else(|| self.error("rope_theta", "it must be a number"))?,
            rms_norm_eps: self.number("rms_norm_eps", 1e-6)?,
            initializer_range: self.number("initializer_range", 0.02)?,
            tie_word_embeddings: self.flag("tie_word_embeddings")?,
        })
    }

    /// A model that would load but compute something else must not load.
    fn refuse_unsupported(&self) -> Result<(), ModelError> {
        let get = |key: &str| self.value.get(key).filter(|value| !value.is_null());
        let is = |value: Option<&Value>, allowed: &str| value.is_none_or(|value| value == allowed);
        if get("model_type").is_none_or(|kind| kind != "llama") {
            return Err(self.error("model_type", "this version loads \"llama\""));
        }
        if !is(get("hidden_act"), "silu") {
            return Err(self.error("hidden_act", "this version computes \"silu\""));
        }
        let rope = get("rope_parameters").or(get("rope_scaling"));
        let rope_type = rope.and_then(|rope| rope.get("rope_type").or(rope.get("type")));
        if !is(rope_type, "default") {
            let key = if get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
            return Err(self.error(key, "this version computes the default rotary embedding, unscaled"));
        }
        if get("sliding_window").is_some() {
            return Err(
                self.error("sliding_window", "this version attends to the whole document: leave it out")
            );
        }
        for key in ["attention_bias", "mlp_bias"] {
            if self.flag(key)? {
                return Err(self.error(key, "this version has no biases"));
            }
        }
        Ok(())
    }

    fn error(&self, key: &'static str, expected: &str) -> ModelError {
        let got = self.value.get(key).map_or("missing".to_owned(), Value::to_string);
        ModelError::Config { origin: self.origin.clone(), key, got, expected: expected.to_owned() }
    }

    fn optional_size(&self, key: &'static str) -> Result<Option<usize>, ModelError> {
        match self.value.get(key).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(size) => Ok(Some(size as usize)),
                None => Err(self.error(key, "it must be a positive integer")),
            },
        }
    }

    fn size(&self, key: &'static str) -> Result<usize, ModelError> {
        self.optional_size(key)?.ok_or_else(|| self.error(key, "it must be a positive integer"))
    }

    fn number(&self, key: &'static str, default: f64) -> Result<f64, ModelError> {
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
