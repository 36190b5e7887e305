//! The description of a Llama-style model.

use super::hf::scaling_to_hf;
use super::{Architecture, HfDescription, Model, ModelError};
use crate::nn::{HeadChunk, ParameterSpec, head_chunks};
use serde_json::{Value, json};
use std::path::Path;
use ulysses_kernels::attention::grouped_heads;
use ulysses_kernels::rope::{Rope, Scaling};

/// Shape of a Llama-style decoder.
///
/// # Examples
///
/// ```
/// use ulysses::model::{LlamaConfig, preset};
///
/// let config = LlamaConfig { num_layers: 4, vocab_size: 32_000, ..preset("nano")? };
/// config.validate("my model")?;
/// assert_eq!(config.q_to_kv(), [0, 0, 1, 1]);
/// # Ok::<(), ulysses::model::ModelError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// The model family.
    pub architecture: Architecture,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; a divisor of `num_heads`.
    pub num_kv_heads: usize,
    /// Elements per head; even.
    pub head_dim: usize,
    /// Base θ of the rotary embedding.
    pub rope_theta: f64,
    /// Scaling of the rotary embedding for longer contexts.
    pub rope_scaling: Scaling,
    /// Epsilon of the RMSNorm, added to the mean square.
    pub rms_norm_eps: f64,
    /// Standard deviation of random initial weights.
    pub initializer_range: f64,
    /// Whether the output projection is the embedding matrix.
    pub tie_word_embeddings: bool,
}

impl LlamaConfig {
    /// Reads the Hugging Face `config.json` of a directory. [`HfDescription`] also has notes for the user.
    ///
    /// # Errors
    /// A file that is missing or is not a JSON object. A model that this version does not support (other
    /// architectures, other RoPE scalings, biases other than Qwen2's, windows in some layers only), or may
    /// not support, because a field is unknown.
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

    /// The same description as a Hugging Face `config.json`.
    pub fn to_hf_json(&self) -> Value {
        let (model_type, class) = self.architecture.hf_names();
        let mut json = json!({
            "architectures": [class], "model_type": model_type, "hidden_act": "silu",
            "vocab_size": self.vocab_size, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size, "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim, "rope_theta": self.rope_theta, "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": self.initializer_range, "tie_word_embeddings": self.tie_word_embeddings,
        });
        if let Architecture::Mistral { sliding_window } = self.architecture {
            json["sliding_window"] = json!(sliding_window);
        }
        if let Some((scaling, max_positions)) = scaling_to_hf(self.rope_scaling) {
            json["rope_scaling"] = scaling;
            if let Some(positions) = max_positions {
                json["max_position_embeddings"] = json!(positions);
            }
        }
        json
    }

    /// The rotary embedding.
    pub fn rope(&self) -> Rope {
        Rope { theta: self.rope_theta, scaling: self.rope_scaling }
    }

    /// Checks the constraints of the layers; errors call the description `origin`.
    ///
    /// # Errors
    /// Sizes that are zero or unrealistically large, an odd `head_dim`, or KV heads that do not divide the
    /// query heads.
    pub fn validate(&self, origin: &str) -> Result<(), ModelError> {
        let error = |key, got: String, expected: String| {
            Err(ModelError::Config { origin: origin.to_owned(), key, got, expected })
        };
        // No model comes near these limits; within them no element count overflows.
        let sizes = [
            ("vocab_size", self.vocab_size, 1 << 32),
            ("hidden_size", self.hidden_size, 1 << 18),
            ("intermediate_size", self.intermediate_size, 1 << 20),
            ("num_hidden_layers", self.num_layers, 1 << 14),
            ("num_attention_heads", self.num_heads, 1 << 12),
            ("num_key_value_heads", self.num_kv_heads, 1 << 12),
            ("head_dim", self.head_dim, 1 << 12),
        ];
        let refused = sizes.into_iter().find(|(_, size, limit)| !(1..=*limit).contains(size));
        if let Some((key, got, limit)) = refused {
            return error(key, got.to_string(), format!("it must be from 1 to {limit}"));
        }
        let numbers = [("rope_theta", self.rope_theta, 1.0), ("rms_norm_eps", self.rms_norm_eps, 0.0)];
        if let Some((key, got, least)) =
            numbers.into_iter().find(|(_, number, least)| !(number.is_finite() && number >= least))
        {
            return error(key, got.to_string(), format!("it must be at least {least}"));
        }
        if !self.head_dim.is_multiple_of(2) {
            return error("head_dim", self.head_dim.to_string(), "rotary embedding needs an even one".into());
        }
        if let Some((argument, value, expected)) = self.rope().refused(self.head_dim) {
            return error("rope_scaling", format!("{argument} {value}"), format!("it must be {expected}"));
        }
        if self.architecture.sliding_window() == Some(0) {
            return error(
                "sliding_window",
                "0".into(),
                "a token sees at least itself: from 1, or null".into(),
            );
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let expected = format!("it must divide num_attention_heads = {}", self.num_heads);
            return error("num_key_value_heads", self.num_kv_heads.to_string(), expected);
        }
        Ok(())
    }

    /// The KV head of each query head.
    pub fn q_to_kv(&self) -> Vec<usize> {
        grouped_heads(self.num_heads, self.num_kv_heads)
    }

    /// Splits the heads into `chunks` parts of whole KV groups, as [`head_chunks`] does.
    pub fn head_chunks(&self, chunks: usize) -> Vec<HeadChunk> {
        head_chunks(self.num_heads, self.num_kv_heads, chunks)
    }

    /// Number of parameters.
    pub fn num_parameters(&self) -> usize {
        self.num_parameters_where(|_| true)
    }

    /// Number of elements of the parameters whose name satisfies `counted`.
    pub fn num_parameters_where(&self, counted: impl Fn(&str) -> bool) -> usize {
        let units = Model::layers_of(self).units();
        let parameters = units.iter().flat_map(|unit| &unit.parameters);
        parameters.filter(|parameter| counted(&parameter.name)).map(ParameterSpec::numel).sum()
    }
}
