//! Fields of a `config.json` that all families read in the same way.

use super::config::MAX_LAYERS;
use super::{FAMILIES, Family, HfConfig, ModelConfig, ModelError, family, listed};
use crate::nn::AttentionConfig;
use serde_json::Value;

/// Why windows or kinds of attention by layer are refused.
pub(super) const SAME_ATTENTION: &str = "this version has the same attention in every layer";

/// Why a field may not be left out whose default is the size of the family's first model.
pub(super) const MUST_BE_GIVEN: &str = "it must be given for this model_type";

/// Reads a `config.json`, by the family that it names.
pub(crate) fn read_config(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    let Some(family) = file.get("model_type").and_then(Value::as_str).and_then(family) else {
        let known = listed(FAMILIES.iter().map(|family| format!("{:?}", family.model_type)), "or");
        return Err(file.error("model_type", &format!("this version loads {known}, and no other family")));
    };
    let (class, classes) = (family.class, file.get("architectures").and_then(Value::as_array));
    if classes.is_some_and(|classes| !classes.iter().any(|known| known == class)) {
        return Err(file.error("architectures", &format!("this version computes {class:?} of this type")));
    }
    (family.read)(file)
}

impl HfConfig<'_> {
    /// A decoder of equal layers.
    pub(crate) fn decoder(
        &self,
        family: &'static Family,
        layer: AttentionConfig,
    ) -> Result<ModelConfig, ModelError> {
        let num_layers = self.size("num_hidden_layers")?;
        if num_layers > MAX_LAYERS {
            return Err(self.error("num_hidden_layers", &format!("it must be from 1 to {MAX_LAYERS}")));
        }
        Ok(ModelConfig {
            family,
            vocab_size: self.size("vocab_size")?,
            hidden_size: self.size("hidden_size")?,
            intermediate_size: self.size("intermediate_size")?,
            layers: vec![layer; num_layers],
            rms_norm_eps: self.number("rms_norm_eps", 1e-6)?,
            initializer_range: self.number("initializer_range", 0.02)?,
            tie_word_embeddings: self.flag("tie_word_embeddings")?,
        })
    }

    /// The attention of a layer that sees the whole document. What is absent is a function of the other sizes.
    pub(crate) fn attention(&self) -> Result<AttentionConfig, ModelError> {
        let num_heads = self.size("num_attention_heads")?;
        let num_kv_heads = self.optional_size("num_key_value_heads")?.unwrap_or(num_heads);
        let head_dim = match self.optional_size("head_dim")? {
            Some(head_dim) => head_dim,
            None => self.size("hidden_size")? / num_heads.max(1),
        };
        Ok(AttentionConfig { num_heads, num_kv_heads, head_dim, window: None, rope: self.rope()? })
    }

    /// Refuses other MLPs than SwiGLU, and biases that the block of Llama does not have.
    pub(crate) fn check_block(&self) -> Result<(), ModelError> {
        if self.get("hidden_act").is_some_and(|act| act != "silu") {
            return Err(self.error("hidden_act", "this version computes \"silu\""));
        }
        for key in ["attention_bias", "mlp_bias"] {
            if self.flag(key)? {
                return Err(self.error(key, "this version has no biases but those of Qwen2"));
            }
        }
        Ok(())
    }

    /// Refuses windows. A `sliding_window` that is not used has no effect.
    pub(crate) fn check_full_attention(&self) -> Result<(), ModelError> {
        self.accept(&["sliding_window"]);
        if self.flag("use_sliding_window")? {
            let expected = "this version has sliding windows for Mistral only";
            return Err(self.error("use_sliding_window", expected));
        }
        let types = self.get("layer_types").and_then(Value::as_array);
        if types.is_some_and(|types| types.iter().any(|kind| kind != "full_attention")) {
            return Err(self.error("layer_types", SAME_ATTENTION));
        }
        Ok(())
    }

    /// Refuses a file without `num_key_value_heads`. transformers would use those of the family's first model.
    pub(crate) fn require_kv_heads(&self) -> Result<(), ModelError> {
        match self.has("num_key_value_heads") {
            true => Ok(()),
            false => Err(self.error("num_key_value_heads", MUST_BE_GIVEN)),
        }
    }
}
