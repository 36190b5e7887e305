//! Transformer models as a stack of layers, and the descriptions and weights that they are made from.
//!
//! - [`Model`]: embedding, layers ([`DecoderLayer`] is their block) and head. Its parameters form units, which
//!   ZeRO partitions, gathers and reduces as a whole.
//! - [`ModelConfig`]: presets and Hugging Face `config.json`, of the [`FAMILIES`].
//! - [`WeightSource`]: the source of initial values, [`RandomWeights`] or [`HfWeights`].

mod description;
mod hf;
#[expect(clippy::module_inception, reason = "`Model` is the main type of this module")]
mod model;
#[cfg(test)]
mod tests;
mod weights;

pub use crate::families::{
    DecoderLayer, DecoderParts, FAMILIES, Family, KnownModel, ModelConfig, ModelError, ModelNames,
    Multipliers, PRESETS, ParallelDecoderLayer, SingleBranchLayer, Sizes, family, known_models,
    max_positions, preset, shape,
};
pub(crate) use hf::TensorFile;
pub use hf::{HfDescription, HfModel, HfSource, HfWeights, OtherTensor};
pub use model::{Model, UnitSpec};
pub use weights::{RandomWeights, WeightSource};
