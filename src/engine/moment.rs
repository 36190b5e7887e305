//! The parts of a step.

use std::fmt;

/// A part of a step. Layers are counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Moment {
    /// A micro batch and its embedding.
    Embedding,
    /// A layer's forward.
    Forward {
        /// Which layer.
        layer: usize,
    },
    /// The head with the loss, forward and backward.
    Head,
    /// A layer's backward, after its forward once more where that is recomputed.
    Backward {
        /// Which layer.
        layer: usize,
    },
    /// The embedding's backward.
    EmbeddingBackward,
    /// The norm, the update, and the parameters of the others.
    Update,
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedding => f.write_str("embedding"),
            Self::Forward { layer } => write!(f, "forward of layer {layer}"),
            Self::Head => f.write_str("LM head and loss"),
            Self::Backward { layer } => write!(f, "backward of layer {layer}"),
            Self::EmbeddingBackward => f.write_str("embedding backward"),
            Self::Update => f.write_str("optimizer step"),
        }
    }
}
