//! Placement along one axis of a mesh.

use std::fmt;

/// Placement of a tensor along one axis of a mesh, in the words of PyTorch's `DTensor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The ranks of the axis divide this dimension, as [`shard_range`](crate::mesh::shard_range) does.
    Shard(usize),
    /// Every rank of the axis has the same elements.
    Replicate,
    /// Every rank of the axis has a partial sum of the elements.
    Partial,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard(dim) => write!(f, "Shard({dim})"),
            Self::Replicate => f.write_str("Replicate"),
            Self::Partial => f.write_str("Partial"),
        }
    }
}

/// An axis of a mesh, and the placement of a tensor along it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LayoutAxis {
    /// Name of the axis.
    pub name: String,
    /// Number of ranks along it.
    pub size: usize,
    /// Placement of the tensor.
    pub placement: Placement,
}

impl LayoutAxis {
    /// An axis with its size and placement.
    pub fn new(name: impl Into<String>, size: usize, placement: Placement) -> Self {
        Self { name: name.into(), size, placement }
    }
}
