//! Hugging Face models: `config.json` in both directions, and weights in safetensors files.

mod config;
mod fields;
mod model;
mod rope;
mod tensor_file;
mod weights;

pub use model::{HfDescription, HfModel, HfSource};
pub(super) use rope::scaling_to_hf;
pub use weights::HfWeights;
