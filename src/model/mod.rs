//! Transformer models as a stack of layers, and the descriptions and weights that they are made from.
//!
//! - [`Model`]: embedding, layers ([`DecoderLayer`] is the Llama block) and head. Its parameters form units, which
//!   ZeRO partitions, gathers and reduces as a whole.
//! - [`LlamaConfig`]: presets and Hugging Face `config.json`.
//! - [`WeightSource`]: the source of initial values, [`RandomWeights`] or [`HfWeights`].

mod architecture;
mod decoder;
mod error;
mod hf;
mod known_models;
mod llama;
#[expect(clippy::module_inception, reason = "`Model` is the main type of this module")]
mod model;
mod preset;
#[cfg(test)]
mod tests;
mod weights;

pub use architecture::Architecture;
pub use decoder::DecoderLayer;
pub use error::ModelError;
pub use hf::{HfDescription, HfModel, HfSource, HfWeights};
pub use known_models::{KNOWN_MODELS, max_positions, shape};
pub use llama::LlamaConfig;
pub use model::{Model, UnitSpec};
pub use preset::{PRESETS, preset};
pub use weights::{RandomWeights, WeightSource};
