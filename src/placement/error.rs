//! Errors of layouts and of their redistribution.

use crate::comm::CommError;
use ulysses_kernels::OpError;

/// An error of a layout or of a redistribution.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// An axis without ranks, or the second one of its name.
    #[error(
        "axis `{axis}` of {size} ranks: {}",
        if *.is_repeated { "a layout has each axis once" } else { "an axis has at least one rank" }
    )]
    Axis {
        /// The axis.
        axis: String,
        /// Its number of ranks.
        size: usize,
        /// Whether an earlier axis has the same name.
        is_repeated: bool,
    },
    /// A sharded dimension that the shape lacks.
    #[error("axis `{axis}` shards dimension {dim}, but the shape {shape:?} has {} dimensions", .shape.len())]
    Dimension {
        /// The axis.
        axis: String,
        /// The dimension.
        dim: usize,
        /// The shape of the tensor.
        shape: Vec<usize>,
    },
    /// A coordinate outside of the mesh.
    #[error("the coordinate {coordinate:?} is outside of a mesh of {mesh:?} ranks")]
    Coordinate {
        /// The coordinate.
        coordinate: Vec<usize>,
        /// The sizes of the axes.
        mesh: Vec<usize>,
    },
    /// Layouts of different shapes or on different meshes.
    #[error(
        "a tensor of layout `{from}` cannot become one of layout `{to}`: shape, or axes and their sizes, differ"
    )]
    Different {
        /// The first layout.
        from: String,
        /// The second layout.
        to: String,
    },
    /// A local tensor that has not the shape of its layout, or groups that have not the sizes of its axes.
    #[error("{what} of `{layout}` is {expected:?} on this rank; got {got:?}")]
    Local {
        /// The property that differs: the shape or the mesh.
        what: &'static str,
        /// The layout.
        layout: String,
        /// The value by the layout.
        expected: Vec<usize>,
        /// The given value.
        got: Vec<usize>,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// An operation was refused.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}
