//! Errors of models and weights.

use std::path::PathBuf;
use ulysses_kernels::OpError;
use ulysses_kernels::attention::AttentionError;

/// What can go wrong in a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A model description has a value that this version cannot train.
    #[error("{origin}: `{key}` is {got}; {expected}")]
    Config {
        /// The file or the preset.
        origin: String,
        /// The offending key.
        key: &'static str,
        /// Its value.
        got: String,
        /// What would be valid.
        expected: String,
    },
    /// A model description has a field that this version does not know.
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
    /// A file is not what its name says.
    #[error("{}: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// A model directory has no weights in a form that is read.
    #[error("{}: no weights: neither {single} nor {index} is there", dir.display())]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// What a single file would be called.
        single: &'static str,
        /// What the list of several would be called.
        index: &'static str,
    },
    /// A shard that an index names is not there.
    #[error("{}: no such file, though {} lists tensors in it", shard.display(), index.display())]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The file.
        shard: PathBuf,
    },
    /// A weight file lacks a parameter.
    #[error("{}: no tensor named {name} (it has {available} tensors)", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The parameter.
        name: String,
        /// How many tensors the file holds.
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
    /// There is no preset of that name.
    #[error("no model preset `{name}`; the presets are {}", presets.join(", "))]
    UnknownPreset {
        /// The name that was asked for.
        name: String,
        /// The names there are.
        presets: Vec<&'static str>,
    },
    /// A layer got the saved state of another kind of layer.
    #[error("layer {layer}: backward was given the saved state of another layer")]
    ForeignSavedState {
        /// The layer.
        layer: String,
    },
    /// The heads of a layer cannot be cut into so many chunks.
    #[error(
        "layer {layer}: its {num_kv_heads} KV heads cannot be cut into {chunks} chunks of whole heads; \
         `ulysses.head_chunks` of 1 to {num_kv_heads} is valid"
    )]
    HeadChunks {
        /// The layer.
        layer: String,
        /// The chunks that were asked for.
        chunks: usize,
        /// Its KV heads, the largest valid number.
        num_kv_heads: usize,
    },
    /// A layer got another number of parameters than it has.
    #[error("layer {layer}: {got} parameters or gradients were passed, it has {expected}")]
    ParameterCount {
        /// The layer.
        layer: String,
        /// How many it has.
        expected: usize,
        /// How many it got.
        got: usize,
    },
    /// A user-defined block does not map hidden states to hidden states.
    #[error("layer {layer}: the block must return f32 of shape {expected:?}, it returned {got:?}")]
    BlockOutput {
        /// The layer.
        layer: String,
        /// Shape of its input.
        expected: Vec<usize>,
        /// Shape of its output.
        got: Vec<usize>,
    },
    /// candle's autograd found no path from a user-defined block's output to a parameter.
    #[error("layer {layer}: no gradient reaches {parameter}; is every op of the block differentiable?")]
    NoGradient {
        /// The layer.
        layer: String,
        /// The parameter.
        parameter: String,
    },
    /// An operation was refused.
    #[error(transparent)]
    Op(#[from] OpError),
    /// Attention failed, on this rank or another.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// A candle operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}
