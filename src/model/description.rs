//! Descriptions by the directory that they are in, and the parameters that they describe.

use super::{HfDescription, Model, ModelConfig, ModelError};
use crate::nn::ParameterSpec;
use serde_json::Value;
use std::path::Path;

impl ModelConfig {
    /// Reads the Hugging Face `config.json` of a directory. [`HfDescription`] also has notes for the user.
    ///
    /// # Errors
    /// A file that is missing or is not a JSON object. A model that this version does not support (other
    /// architectures, other RoPE scalings, other biases), or may not support, because a field is unknown.
    pub fn from_hf_dir(dir: &Path) -> Result<Self, ModelError> {
        Ok(HfDescription::from_dir(dir)?.config)
    }

    /// Reads a description, as the inverse of [`to_hf_json`](Self::to_hf_json). Errors call it `origin`.
    ///
    /// # Errors
    /// As [`from_hf_dir`](Self::from_hf_dir), except for reading.
    pub fn from_hf_json(value: Value, origin: &str) -> Result<Self, ModelError> {
        Ok(HfDescription::from_json(value, origin)?.config)
    }

    /// Number of parameters.
    pub fn num_parameters(&self) -> usize {
        self.num_parameters_where(|_| true)
    }

    /// Number of elements of the parameters whose name satisfies `counted`.
    pub fn num_parameters_where(&self, counted: impl Fn(&str) -> bool) -> usize {
        let units = Model::unchecked(self).units();
        let parameters = units.iter().flat_map(|unit| &unit.parameters);
        parameters.filter(|parameter| counted(&parameter.name)).map(ParameterSpec::numel).sum()
    }
}
