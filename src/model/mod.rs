//! Transformer models as a stack of layers with hand-written backward passes.
//!
//! - [`Layer`]: the trait that the engine calls; [`DecoderLayer`] is the Llama block, [`AutogradLayer`] runs
//!   any block written with candle ops.
//! - [`Embedding`] before and [`LossHead`] after the layers; the head computes only [`LabeledTokens`].
//! - [`Model`]: the three together. Its parameters form units, which ZeRO partitions, gathers and reduces as
//!   a whole.
//! - [`LlamaConfig`]: presets and Hugging Face `config.json`.
//! - [`WeightSource`]: the source of initial values, [`RandomWeights`] or [`HfWeights`].
//!
//! The engine owns parameters and gradients; layers get views of them. This module does not communicate:
//! [`Attention`](ulysses_kernels::attention::Attention) hides the other ranks.

mod architecture;
mod attention_node;
mod autograd;
mod context;
mod decoder;
mod embedding;
mod error;
mod hf;
mod known_models;
mod labeled_tokens;
mod layer;
mod llama;
mod lm_head;
#[expect(clippy::module_inception, reason = "`Model` is the main type of this module")]
mod model;
mod preset;
#[cfg(test)]
mod tests;
mod weights;

pub use architecture::Architecture;
pub use attention_node::autograd_attention;
pub use autograd::{AutogradLayer, BlockContext};
pub use context::{LayerContext, Tiling, TokenLayout};
pub use decoder::DecoderLayer;
pub use embedding::Embedding;
pub use error::ModelError;
pub use hf::{HfDescription, HfModel, HfSource, HfWeights};
pub use known_models::{KNOWN_MODELS, max_positions, shape};
pub use labeled_tokens::LabeledTokens;
pub use layer::{AttentionExtent, Init, Layer, ParameterSpec, Saved};
pub use llama::{HeadChunk, LlamaConfig};
pub use lm_head::{HeadSaved, LossHead};
pub use model::{Model, UnitSpec};
pub use preset::{PRESETS, preset};
pub use weights::{RandomWeights, WeightSource};
