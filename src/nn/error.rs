//! Errors of layers.

use ulysses_kernels::OpError;
use ulysses_kernels::attention::AttentionError;

/// An error of a layer or of one of its modules.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// A layer got the saved state of another kind of layer.
    #[error("layer {layer}: backward got the saved state of another layer")]
    ForeignSavedState {
        /// The layer.
        layer: String,
    },
    /// The KV heads of a layer cannot be split into that many chunks, or its norms need all heads at once.
    #[error(
        "layer {layer}: its heads cannot be split into {chunks} chunks of whole KV heads, or of all heads if a norm spans them; \
         `ulysses.head_chunks` of 1 to {max_chunks} is valid"
    )]
    HeadChunks {
        /// The layer.
        layer: String,
        /// The number of chunks.
        chunks: usize,
        /// The largest valid number of chunks.
        max_chunks: usize,
    },
    /// The weights of a layer cannot be divided over that many tensor-parallel ranks.
    #[error(
        "layer {layer}: its heads and its MLP cannot be divided over tp = {size} ranks; tp of 1 to {max_size} is valid"
    )]
    TensorRanks {
        /// The layer.
        layer: String,
        /// The number of ranks.
        size: usize,
        /// The largest valid number of ranks.
        max_size: usize,
    },
    /// A layer that does not support tensor parallelism.
    #[error(
        "layer {layer}: this kind of layer cannot be divided over tensor-parallel ranks: use tp = 1, or implement `Layer::tensor_parallel`"
    )]
    NoTensorParallelism {
        /// The layer.
        layer: String,
    },
    /// A weight has fewer parts than there are ranks to divide it.
    #[error(
        "layer {layer}: `{parameter}` has {parts} parts along the dimension that the plan divides, fewer than tp = {size} ranks; \
         tp of 1 to {parts} is valid"
    )]
    PlannedWeight {
        /// The layer.
        layer: String,
        /// The weight.
        parameter: String,
        /// Number of parts that must stay whole.
        parts: usize,
        /// The number of ranks.
        size: usize,
    },
    /// The parts of planned weights do not fit their shape, or each other.
    #[error("layer {layer}: `{parameter}` is in {parts} parts; {expected}")]
    WeightParts {
        /// The layer.
        layer: String,
        /// The weight.
        parameter: String,
        /// Number of its parts.
        parts: usize,
        /// The expected number of parts.
        expected: String,
    },
    /// A layer has no linear layer of this name.
    #[error(
        "layer {layer}: no parameter is called `{name}.weight` or `{layer}.{name}.weight` and is a matrix; it has the matrices {}",
        known.join(", ")
    )]
    UnknownLinear {
        /// The layer.
        layer: String,
        /// The name.
        name: String,
        /// Its parameters with two dimensions.
        known: Vec<String>,
    },
    /// A linear layer got an input of another width.
    #[error("`{parameter}` takes inputs of width {expected}, got {got}{}", if *is_rowwise {
        "; tp divides its inputs, so they must be the outputs of a layer that the plan divides \"colwise\""
    } else {
        ""
    })]
    LinearInput {
        /// The weight.
        parameter: String,
        /// The valid width, on this rank.
        expected: usize,
        /// The width.
        got: usize,
        /// Whether the ranks of tp divide the inputs.
        is_rowwise: bool,
    },
    /// A block computes with a divided weight by other operations.
    #[error(
        "layer {layer}: the plan divides `{parameter}` over tp, so the block must compute it by `BlockContext::linear`, which sums \
         over the ranks"
    )]
    PlanNotUsed {
        /// The layer.
        layer: String,
        /// The weight.
        parameter: String,
    },
    /// A document is longer than the model has learned positions.
    #[error(
        "a document has {len} tokens or more, and the model {num_positions} learned positions: \
         use sequences of at most {num_positions} tokens"
    )]
    TooLongDocument {
        /// Tokens of the document so far.
        len: usize,
        /// Number of positions.
        num_positions: usize,
    },
    /// An exchange of tokens failed, on this rank or another.
    #[error(transparent)]
    Exchange(Box<dyn std::error::Error + Send + Sync>),
    /// A layer got the wrong number of parameters or gradients.
    #[error("layer {layer}: got {got} parameters or gradients, expected {expected}")]
    ParameterCount {
        /// The layer.
        layer: String,
        /// The expected number.
        expected: usize,
        /// The actual number.
        got: usize,
    },
    /// A user-defined block returned a tensor of the wrong shape or type.
    #[error(
        "layer {layer}: the block must return the dtype of its input and the shape {expected:?}, it returned {got:?}"
    )]
    BlockOutput {
        /// The layer.
        layer: String,
        /// The shape that it must return.
        expected: Vec<usize>,
        /// Shape of its output.
        got: Vec<usize>,
    },
    /// A user-defined loss returned a tensor of another shape.
    #[error("objective {objective}: the sum of its terms must be a scalar, its shape is {got:?}")]
    LossOutput {
        /// The objective.
        objective: String,
        /// Shape of the sum.
        got: Vec<usize>,
    },
    /// candle's autograd found no path from the output of a user-defined block or loss to a parameter.
    #[error("{owner}: no gradient reaches {parameter}; is every op differentiable?")]
    NoGradient {
        /// The layer or the objective.
        owner: String,
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

impl LayerError {
    /// A layer called `layer` got the saved state of another kind of layer.
    pub(crate) fn foreign_state(layer: &str) -> Self {
        Self::ForeignSavedState { layer: layer.to_owned() }
    }

    /// A layer got `got` instead of `expected` parameters.
    pub(crate) fn parameter_count(layer: &str, expected: usize, got: usize) -> Self {
        Self::ParameterCount { layer: layer.to_owned(), expected, got }
    }
}
