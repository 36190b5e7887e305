//! Gemma 1 to 4.

#[expect(clippy::module_inception, reason = "the first model has the family's name")]
mod gemma;
mod gemma2;
mod gemma3;
mod gemma4;

pub(super) use gemma::GEMMA;
pub(super) use gemma2::GEMMA2;
pub(super) use gemma3::GEMMA3;
pub(super) use gemma4::GEMMA4;

use super::{DecoderParts, HfConfig, ModelConfig, ModelError, Multipliers};
use crate::nn::BranchNorms;
use serde_json::{Value, json};
use ulysses_kernels::glu::Activation;

/// PyTorch's name of the approximate GELU.
const ACTIVATION: &str = "gelu_pytorch_tanh";

/// The block of Gemma 2 to 4: norms before and after both modules.
const SANDWICH: DecoderParts = DecoderParts {
    attention_norms: BranchNorms { before: Some("input_layernorm"), after: Some("post_attention_layernorm") },
    mlp_norms: BranchNorms {
        before: Some("pre_feedforward_layernorm"),
        after: Some("post_feedforward_layernorm"),
    },
    activation: Activation::GeluTanh,
    ..DecoderParts::LLAMA
};

/// Fields that Gemma 2 and 3 share; returns the factor on the logits of attention.
fn read_shared(file: &HfConfig<'_>) -> Result<f64, ModelError> {
    file.check_activation("hidden_activation", ACTIVATION)?;
    file.accept(&["hidden_act"]);
    file.check_biases()?;
    file.require_kv_heads()?;
    file.check_causal()?;
    match file.number("query_pre_attn_scalar", 256.0)? {
        scalar if scalar.is_finite() && scalar > 0.0 => Ok(1.0 / scalar.sqrt()),
        _ => Err(file.error("query_pre_attn_scalar", "it must be positive")),
    }
}

/// The inverse of [`read_shared`].
fn write_shared(config: &ModelConfig, json: &mut Value) {
    json["hidden_activation"] = json!(ACTIVATION);
    let scale = config.attention_layers().next().and_then(|layer| layer.scale);
    json["query_pre_attn_scalar"] = scale.map_or(json!(256), |scale| decimal(1.0 / (scale * scale)));
}

/// The number that was written before its square root was taken; transformers accepts no fraction of 0.
fn decimal(number: f64) -> Value {
    let written: f64 = format!("{number:.12e}").parse().unwrap_or(number);
    if written.fract() == 0.0 { json!(written as u64) } else { json!(written) }
}

/// A soft cap: absent means that of the family's first model, `null` none.
fn softcap(file: &HfConfig<'_>, key: &'static str, first: Option<f64>) -> Result<Option<f64>, ModelError> {
    match file.has(key) {
        true if file.get(key).is_none() => Ok(None),
        true => Ok(Some(file.number(key, 0.0)?)),
        false => Ok(first),
    }
}

/// Sets the constants of Gemma 1 to 3: the norms' offset of 1, and the factor on the embedding.
fn with_constants(config: ModelConfig) -> ModelConfig {
    with_embedding_factor(ModelConfig { norm_offset: 1.0, ..config })
}

/// Sets √hidden_size as the factor on the embedding.
fn with_embedding_factor(config: ModelConfig) -> ModelConfig {
    let embedding = (config.hidden_size as f64).sqrt();
    ModelConfig { multipliers: Multipliers { embedding, ..Multipliers::default() }, ..config }
}
