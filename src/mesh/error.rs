//! What can be wrong with a mesh or a request to one.

/// An invalid mesh, or a request that a mesh cannot serve.
///
/// Lists of axes are carried in the order of the mesh, so a message can say what would be valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// A mesh, slice or flattening without any axis.
    #[error("at least one axis is needed, none was given")]
    NoAxes,
    /// An axis name that the notation `name=size,…` could not carry.
    #[error("invalid axis name `{name}`: use letters, digits, `_`, `-` or `.`, at least one")]
    InvalidName {
        /// The name as given.
        name: String,
    },
    /// Two axes of one name (aliases count as the name they stand for).
    #[error("axis `{name}` is named twice; every axis needs its own name")]
    DuplicateName {
        /// The repeated name, with aliases resolved.
        name: String,
    },
    /// A size that is neither positive nor the `-1` to infer.
    #[error("axis `{axis}` has size {size}; valid are sizes from 1, and -1 for one axis to infer")]
    InvalidSize {
        /// The axis.
        axis: String,
        /// Its size as given.
        size: i64,
    },
    /// More than one `-1`.
    #[error("sizes of {} are all -1; at most one axis can be inferred", axes.join(", "))]
    SeveralInferred {
        /// The axes of size `-1`.
        axes: Vec<String>,
    },
    /// A `-1` without a number of ranks to infer it from.
    #[error("axis `{axis}` has size -1, which needs a known world size; give its size or the world size")]
    InferWithoutWorldSize {
        /// The axis to infer.
        axis: String,
    },
    /// A `-1` for which no integer fits.
    #[error(
        "axis `{axis}` cannot be inferred: the other sizes multiply to {known}, which does not divide {total}"
    )]
    CannotInfer {
        /// The axis to infer.
        axis: String,
        /// Product of the given sizes.
        known: usize,
        /// The number of ranks to reach.
        total: usize,
    },
    /// The product of the sizes is not the number of ranks.
    #[error("mesh {mesh} takes {product} ranks, but there are {world_size}")]
    WorldSizeMismatch {
        /// The mesh in the notation `name=size,…`.
        mesh: String,
        /// The product of its sizes.
        product: usize,
        /// The number of ranks given.
        world_size: usize,
    },
    /// A mesh larger than any cluster: a typing error that must not exhaust memory.
    #[error("mesh {mesh} has more than {limit} ranks")]
    TooManyRanks {
        /// The mesh in the notation `name=size,…`.
        mesh: String,
        /// The largest number of ranks supported.
        limit: usize,
    },
    /// A rank that stands at two coordinates.
    #[error("rank {rank} is listed twice; every coordinate needs its own rank")]
    DuplicateRank {
        /// The repeated rank.
        rank: usize,
    },
    /// A name that is no axis of this mesh.
    #[error("no axis `{axis}` in this mesh; its axes are {}", axes.join(", "))]
    UnknownAxis {
        /// The name asked for.
        axis: String,
        /// The axes there are.
        axes: Vec<String>,
    },
    /// Axes asked for in another order than the mesh's, or twice.
    #[error(
        "axes {} are repeated or out of order; the valid order here is {}", requested.join(", "), valid.join(", ")
    )]
    AxisOrder {
        /// The axes as asked for.
        requested: Vec<String>,
        /// The same axes, once each, in the order of the mesh.
        valid: Vec<String>,
    },
    /// A rank that the mesh does not hold.
    #[error("rank {rank} is not a member of this mesh; its ranks are {members}")]
    NotAMember {
        /// The rank asked for.
        rank: usize,
        /// The mesh's ranks, in words.
        members: String,
    },
    /// A coordinate with another number of entries than the mesh has axes.
    #[error(
        "a coordinate with {given} entries was given; this mesh needs one per axis of {}", axes.join(", ")
    )]
    CoordinateLength {
        /// Entries given.
        given: usize,
        /// The axes of the mesh.
        axes: Vec<String>,
    },
    /// A coordinate past the end of an axis.
    #[error("coordinate {coordinate} is outside axis `{axis}`, whose coordinates are below {size}")]
    CoordinateOutOfRange {
        /// The axis.
        axis: String,
        /// The coordinate given.
        coordinate: usize,
        /// The size of the axis.
        size: usize,
    },
    /// Sizes that do not multiply to the axis they are to replace.
    #[error("axis `{axis}` of size {size} cannot become {into}, whose sizes multiply to {product}")]
    UnflattenSize {
        /// The axis to split.
        axis: String,
        /// Its size.
        size: usize,
        /// The axes asked for, in the notation `name=size,…`.
        into: String,
        /// The product of their sizes.
        product: usize,
    },
    /// Submeshes of different ranks, which no single rank could see as one mesh.
    #[error("submeshes {first} and {other} share no rank; take all of them for the same rank")]
    NoCommonRank {
        /// The first submesh.
        first: String,
        /// The submesh without a rank in common with it and those before.
        other: String,
    },
    /// Submeshes that run along the same axis of their mesh.
    #[error("submeshes {first} and {other} both run along axis `{axis}`; each axis can be joined once")]
    OverlappingAxes {
        /// The submesh that runs along the axis first.
        first: String,
        /// The submesh that does so again.
        other: String,
        /// The axis of the mesh they were taken from.
        axis: String,
    },
    /// Not one name and one size of each side for every axis.
    #[error(
        "a hybrid mesh has one size per axis within a node and one between nodes, got {axes} axes, {intra} size(s) \
         within a node and {inter} between nodes"
    )]
    HybridLengths {
        /// Number of axis names.
        axes: usize,
        /// Number of sizes within a node.
        intra: usize,
        /// Number of sizes between nodes.
        inter: usize,
    },
    /// One side of a hybrid mesh is wrong by itself.
    #[error("{side}: {source}")]
    Side {
        /// `within a node` or `between nodes`.
        side: &'static str,
        /// What is wrong with it.
        source: Box<MeshError>,
    },
    /// No axis can run across the nodes.
    #[error(
        "no axis of {mesh} divides by the {nodes} nodes that it should run across; give the sizes within a node and \
         between nodes one by one"
    )]
    NoAxisAcrossNodes {
        /// The mesh in the notation `name=size,…`.
        mesh: String,
        /// Number of nodes.
        nodes: usize,
    },
    /// Devices on more or fewer nodes than the mesh has.
    #[error("the mesh has {nodes} nodes, but the devices are on {found}")]
    NodeCount {
        /// Nodes of the mesh.
        nodes: usize,
        /// Nodes of the devices.
        found: usize,
    },
    /// A node with more or fewer devices than the mesh has on each.
    #[error("the mesh has {ranks_per_node} ranks on each node, but node {node} has {found} devices")]
    UnevenNode {
        /// The node.
        node: usize,
        /// Ranks on a node of the mesh.
        ranks_per_node: usize,
        /// Devices of the node.
        found: usize,
    },
    /// A preset without a number of ranks to take its sizes from.
    #[error(
        "the mesh `{preset}` takes its sizes from the processes of a job, and there are none here: write \
         `{preset}=NODESxRANKS`, such as `{preset}=2x8`"
    )]
    PresetWithoutCluster {
        /// Its name.
        preset: String,
    },
    /// Text that is no mesh.
    #[error(
        "cannot read `{text}` as a mesh: {reason}; write DPxSP such as `2x4`, or axes such as `dp=2,sp=4`"
    )]
    Notation {
        /// The text.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
}
