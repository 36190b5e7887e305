//! Blocks with LayerNorm, biases, and an MLP without a gate: GPT-2, GPT-J, GPT-NeoX and StarCoder 2.

mod gpt2;
mod gpt_neox;
mod gptj;
mod starcoder2;

pub(super) use gpt_neox::GPT_NEOX;
pub(super) use gpt2::GPT2;
pub(super) use gptj::GPTJ;
pub(super) use starcoder2::STARCODER2;

use super::ModelConfig;

/// The model with LayerNorm, and biases in the MLP.
fn with_layer_norm(config: ModelConfig) -> ModelConfig {
    ModelConfig { centered_norms: true, norm_bias: true, mlp_bias: true, ..config }
}
