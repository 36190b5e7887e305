//! Errors of layouts and of their redistribution.

use super::Placement;
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
    /// Fewer or more placements than the mesh has axes.
    #[error("the placements {} on the mesh {mesh}: expected one per axis", listed(.placements))]
    Placements {
        /// The mesh.
        mesh: String,
        /// The placements.
        placements: Vec<Placement>,
    },
    /// Text that is not a layout.
    #[error(
        "`{text}`: {reason}; expected a shape and one placement per axis, such as `7,3:Shard(0),Replicate`"
    )]
    Notation {
        /// The text.
        text: String,
        /// The mistake in it.
        reason: String,
    },
    /// A rank whose tensor does not fit those of the others.
    #[error(
        "with the layout `{layout}`, the rank at {coordinate:?} needs a tensor of {expected}; it has {got}"
    )]
    OtherRank {
        /// The layout of all ranks' tensors.
        layout: String,
        /// Coordinate of the first rank that differs.
        coordinate: Vec<usize>,
        /// The dtype and shape that it needs.
        expected: String,
        /// The dtype and shape that it has.
        got: String,
    },
    /// Operands on different meshes.
    #[error("`{call}`: a is on the mesh {first}, b on the mesh {second}; expected one mesh")]
    Meshes {
        /// The operation.
        call: &'static str,
        /// The mesh of the first operand.
        first: String,
        /// The mesh of the second operand.
        second: String,
    },
    /// Shapes that an operation does not accept.
    #[error("`{call}` of shape {}: expected {expected}", .shapes.iter().map(|shape| format!("{shape:?}")).collect::<Vec<_>>().join(" and "))]
    Shape {
        /// The operation.
        call: &'static str,
        /// The logical shapes of the operands.
        shapes: Vec<Vec<usize>>,
        /// The valid shapes.
        expected: String,
    },
    /// Placements for which an operation has no rule.
    #[error(
        "`{call}` has no rule for {} along axis `{axis}`; it works with {}",
        .placements.iter().map(Placement::to_string).collect::<Vec<_>>().join(" and "),
        calls(.valid)
    )]
    NoRule {
        /// The operation.
        call: &'static str,
        /// The first axis without a rule.
        axis: String,
        /// The placements of the operands along it.
        placements: Vec<Placement>,
        /// Per operand the placements with which the operation works; `None` if its own are.
        valid: Vec<Option<Vec<Placement>>>,
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

/// Formats placements as the argument of a call: `&[Shard(0), Replicate]`.
fn listed(placements: &[Placement]) -> String {
    format!("&[{}]", placements.iter().map(Placement::to_string).collect::<Vec<_>>().join(", "))
}

/// Formats the redistribution of each operand, by the names in the operation's call.
fn calls(valid: &[Option<Vec<Placement>>]) -> String {
    let call = |(placements, name): (&Option<Vec<Placement>>, char)| {
        placements.as_ref().map(|placements| format!("`{name}.redistribute({})?`", listed(placements)))
    };
    valid.iter().zip('a'..).filter_map(call).collect::<Vec<_>>().join(" and ")
}
