//! The parts of a step.

use std::fmt;

/// A part of a step. Layers are numbered from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StepPart {
    /// Start of a micro batch, with its embedding.
    Embedding,
    /// A layer's forward.
    Forward {
        /// Index of the layer.
        layer: usize,
    },
    /// The LM head with the loss, forward and backward.
    Head,
    /// A layer's backward, including the recomputation of its forward if any.
    Backward {
        /// Index of the layer.
        layer: usize,
    },
    /// The gradients of a layer's weights, if they have a pass of their own.
    WeightBackward {
        /// Index of the layer.
        layer: usize,
    },
    /// The embedding's backward.
    EmbeddingBackward,
    /// Norm, clipping, update, and the all-gather of parameters.
    Update,
}

impl fmt::Display for StepPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedding => f.write_str("embedding"),
            Self::Forward { layer } => write!(f, "forward of layer {layer}"),
            Self::Head => f.write_str("LM head and loss"),
            Self::Backward { layer } => write!(f, "backward of layer {layer}"),
            Self::WeightBackward { layer } => write!(f, "weight gradients of layer {layer}"),
            Self::EmbeddingBackward => f.write_str("embedding backward"),
            Self::Update => f.write_str("optimizer step"),
        }
    }
}
