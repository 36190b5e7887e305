//! Blocks with LayerNorm, biases, and an MLP without a gate: GPT-2, GPT-J, GPT-NeoX and StarCoder 2.

mod gpt2;
mod gpt_neox;
mod gptj;
mod starcoder2;

pub(super) use gpt_neox::GPT_NEOX;
pub(super) use gpt2::GPT2;
pub(super) use gptj::GPTJ;
pub(super) use starcoder2::STARCODER2;

use super::read::remove_fields;
use super::{HfConfig, ModelConfig, ModelError, Sizes};
use serde_json::{Value, json};

/// The sizes in a file with the names of GPT-2.
fn read_sizes(file: &HfConfig<'_>) -> Result<Sizes, ModelError> {
    let (hidden_size, num_heads) = (file.size("n_embd")?, file.size("n_head")?);
    if num_heads == 0 || !hidden_size.is_multiple_of(num_heads) {
        return Err(file.error("n_head", &format!("it must divide n_embd = {hidden_size}")));
    }
    let intermediate_size = file.optional_size("n_inner")?.unwrap_or(4 * hidden_size);
    Ok([hidden_size, file.num_layers("n_layer")?, num_heads, num_heads, intermediate_size])
}

/// Writes sizes, activation and epsilon by the names of GPT-2 instead of those of Llama.
fn write_sizes(config: &ModelConfig, json: &mut Value) {
    const OTHERS: [&str; 9] = [
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
    ];
    remove_fields(json, &OTHERS);
    json["activation_function"] = json!("gelu_new");
    json["n_embd"] = json!(config.hidden_size);
    json["n_inner"] = json!(config.intermediate_size);
    json["n_layer"] = json!(config.num_layers());
    json["n_head"] = json!(config.attention_layers().next().map(|layer| layer.num_heads));
    json["layer_norm_epsilon"] = json!(config.rms_norm_eps);
}

/// The model with LayerNorm, and biases in the MLP.
fn with_layer_norm(config: ModelConfig) -> ModelConfig {
    ModelConfig { centered_norms: true, norm_bias: true, mlp_bias: true, ..config }
}
