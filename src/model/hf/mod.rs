//! Hugging Face models: a directory with a description, and weights in safetensors files.

mod model;
mod tensor_file;
mod weights;

pub use model::{HfDescription, HfModel, HfSource};
pub(crate) use tensor_file::TensorFile;
pub use weights::{HfWeights, OtherTensor};
