//! Errors of models and weights.

use std::path::PathBuf;
use ulysses_kernels::OpError;

/// An error of a model or its weights.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A model description has an unsupported value.
    #[error("{origin}: `{key}` is {got}; {expected}")]
    Config {
        /// The file or the preset.
        origin: String,
        /// The key.
        key: &'static str,
        /// Its value.
        got: String,
        /// What would be valid.
        expected: String,
    },
    /// A model description has an unknown field.
    #[error(
        "{origin}: `{key}` is {got}; the field is unknown and may change the model: remove it if it has no effect"
    )]
    UnknownField {
        /// The file.
        origin: String,
        /// The field.
        key: String,
        /// Its value.
        got: String,
    },
    /// A file has an invalid format.
    #[error("{}: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// A model directory has no weights in a known form.
    #[error("{}: no weights: neither {single} nor {index} exists{advice}", dir.display())]
    NoWeights {
        /// What is there instead, and what to do.
        advice: String,
        /// The directory.
        dir: PathBuf,
        /// Name of a single weight file.
        single: &'static str,
        /// Name of the index of a sharded one.
        index: &'static str,
    },
    /// A shard that the index lists does not exist.
    #[error("{}: no such file, though {} lists tensors in it", shard.display(), index.display())]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The file.
        shard: PathBuf,
    },
    /// A directory without `config.json`, of another program.
    #[error("{}: no config.json; {advice}", dir.display())]
    NotAModel {
        /// The directory.
        dir: PathBuf,
        /// What is there instead, and what to do.
        advice: String,
    },
    /// A weight file lacks a parameter.
    #[error("{}: no tensor named {name} (it has {available} tensors){}", path.display(), without_head(name))]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The parameter.
        name: String,
        /// Number of tensors in the file.
        available: usize,
    },
    /// A stored parameter has another shape than the model's.
    #[error("{}: tensor {name} has shape {got:?}, the model needs {expected:?}", path.display())]
    TensorShape {
        /// The file.
        path: PathBuf,
        /// The parameter.
        name: String,
        /// Shape in the model.
        expected: Vec<usize>,
        /// Shape in the file.
        got: Vec<usize>,
    },
    /// The model preset is unknown.
    #[error("unknown model preset `{name}`; the presets are {}", presets.join(", "))]
    UnknownPreset {
        /// The unknown name.
        name: String,
        /// The known presets.
        presets: Vec<&'static str>,
    },
    /// A published model of an unsupported family.
    #[error("the model `{name}` is not supported: {reason}")]
    UnsupportedModel {
        /// Its name.
        name: String,
        /// The part of the model that is not supported.
        reason: String,
    },
    /// An operation was refused.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A candle operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// Says what a model without a head of its own needs.
fn without_head(tensor: &str) -> &'static str {
    match tensor {
        "lm_head.weight" | "embed_out.weight" => {
            "; if the model shares it with the embedding, set `tie_word_embeddings` to true in config.json"
        }
        _ => "",
    }
}
