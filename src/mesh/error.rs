//! Errors of meshes.

/// An invalid mesh, or an invalid operation on a mesh.
///
/// Lists of axes are in the order of the mesh.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// A mesh, slice or flattening without axes.
    #[error("no axis given; at least one is required")]
    NoAxes,
    /// An axis name that the notation `name=size,…` cannot represent.
    #[error("invalid axis name `{name}`: use letters, digits, `_`, `-` or `.`, at least one character")]
    InvalidName {
        /// The given name.
        name: String,
    },
    /// Two axes with the same name, aliases resolved.
    #[error("duplicate axis `{name}`; axis names must be unique")]
    DuplicateName {
        /// The repeated name, with aliases resolved.
        name: String,
    },
    /// A size that is neither positive nor `-1`.
    #[error("axis `{axis}` has size {size}; valid sizes are 1 or more, or -1 for one axis to infer")]
    InvalidSize {
        /// The axis.
        axis: String,
        /// The given size.
        size: i64,
    },
    /// More than one `-1`.
    #[error("axes {} have size -1; at most one size can be inferred", axes.join(", "))]
    SeveralInferred {
        /// The axes of size `-1`.
        axes: Vec<String>,
    },
    /// A `-1` without a world size to infer it from.
    #[error("axis `{axis}` has size -1, but the world size is unknown; give its size or the world size")]
    InferWithoutWorldSize {
        /// The axis to infer.
        axis: String,
    },
    /// A `-1` that no integer satisfies.
    #[error(
        "size of axis `{axis}` cannot be inferred: the product of the other sizes, {known}, does not divide {total}"
    )]
    CannotInfer {
        /// The axis to infer.
        axis: String,
        /// Product of the given sizes.
        known: usize,
        /// The required number of ranks.
        total: usize,
    },
    /// The product of the sizes is not the number of ranks.
    #[error("mesh {mesh} needs {product} ranks, but the world size is {world_size}")]
    WorldSizeMismatch {
        /// The mesh in the notation `name=size,…`.
        mesh: String,
        /// The product of its sizes.
        product: usize,
        /// The given number of ranks.
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
    /// A rank at two coordinates.
    #[error("duplicate rank {rank}; ranks must be unique")]
    DuplicateRank {
        /// The repeated rank.
        rank: usize,
    },
    /// A name that is not an axis of the mesh.
    #[error("unknown axis `{axis}`; the axes of this mesh are {}", axes.join(", "))]
    UnknownAxis {
        /// The requested name.
        axis: String,
        /// The axes of the mesh.
        axes: Vec<String>,
    },
    /// Requested axes that are repeated, or not in the order of the mesh.
    #[error(
        "axes {} are repeated or out of order; the valid order is {}", requested.join(", "), valid.join(", ")
    )]
    AxisOrder {
        /// The requested axes.
        requested: Vec<String>,
        /// The same axes, once each, in the order of the mesh.
        valid: Vec<String>,
    },
    /// A rank that is not in the mesh.
    #[error("rank {rank} is not in this mesh; its ranks are {members}")]
    NotAMember {
        /// The requested rank.
        rank: usize,
        /// The ranks of the mesh, formatted.
        members: String,
    },
    /// A coordinate whose length is not the number of axes.
    #[error(
        "coordinate has {given} entries; this mesh needs one per axis: {}", axes.join(", ")
    )]
    CoordinateLength {
        /// Entries given.
        given: usize,
        /// The axes of the mesh.
        axes: Vec<String>,
    },
    /// A coordinate outside an axis.
    #[error("coordinate {coordinate} on axis `{axis}` is out of range; valid coordinates are below {size}")]
    CoordinateOutOfRange {
        /// The axis.
        axis: String,
        /// The coordinate given.
        coordinate: usize,
        /// The size of the axis.
        size: usize,
    },
    /// Sizes whose product is not the size of the axis to split.
    #[error(
        "axis `{axis}` of size {size} cannot be split into {into}: the product of the sizes is {product}"
    )]
    UnflattenSize {
        /// The axis to split.
        axis: String,
        /// Its size.
        size: usize,
        /// The requested axes, in the notation `name=size,…`.
        into: String,
        /// The product of their sizes.
        product: usize,
    },
    /// Submeshes without a common rank.
    #[error("submeshes {first} and {other} share no rank; take all submeshes for the same rank")]
    NoCommonRank {
        /// The first submesh.
        first: String,
        /// The submesh that shares no rank with the previous ones.
        other: String,
    },
    /// Two submeshes along the same axis of their mesh.
    #[error("submeshes {first} and {other} both run along axis `{axis}`; each axis may be used once")]
    OverlappingAxes {
        /// The first submesh along the axis.
        first: String,
        /// The second submesh along the axis.
        other: String,
        /// The axis of the original mesh.
        axis: String,
    },
    /// Different numbers of axis names, sizes within a node and sizes between nodes.
    #[error(
        "a hybrid mesh needs one size within a node and one between nodes per axis; got {axes} axes, {intra} size(s) \
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
    /// Invalid sizes within a node or between nodes.
    #[error("{side}: {source}")]
    Side {
        /// `within a node` or `between nodes`.
        side: &'static str,
        /// The error of these sizes.
        source: Box<MeshError>,
    },
    /// A number of nodes other than that of the mesh.
    #[error("the mesh has {nodes} nodes, but the devices are on {found}")]
    NodeCount {
        /// Nodes of the mesh.
        nodes: usize,
        /// Nodes of the devices.
        found: usize,
    },
    /// A number of devices on a node other than that of the mesh.
    #[error("the mesh has {ranks_per_node} ranks per node, but node {node} has {found} devices")]
    UnevenNode {
        /// The node.
        node: usize,
        /// Ranks per node of the mesh.
        ranks_per_node: usize,
        /// Devices of the node.
        found: usize,
    },
    /// Nodes with different numbers of ranks, for a mesh that needs equal ones.
    #[error(
        "the nodes have different numbers of ranks ({nodes}); start the same number on each, or give the mesh as DPxSP"
    )]
    UnequalNodes {
        /// Every node with its number of ranks.
        nodes: String,
    },
    /// A hybrid shape for other nodes than those of the job.
    #[error(
        "the mesh {mesh} has {nodes} node(s) of {ranks_per_node} rank(s), but the ranks are on {found}; use sizes with \
         these products"
    )]
    OtherNodes {
        /// The mesh in the notation of [`MeshSpec`](super::MeshSpec).
        mesh: String,
        /// Nodes of the mesh.
        nodes: usize,
        /// Ranks per node of the mesh.
        ranks_per_node: usize,
        /// The nodes of the job, with their numbers of ranks.
        found: String,
    },
    /// A preset without a cluster to infer its sizes from.
    #[error(
        "mesh preset `{preset}` needs the number of nodes and ranks, which is unknown here; write \
         `{preset}=NODESxRANKS`, such as `{preset}=2x8`"
    )]
    PresetWithoutCluster {
        /// Its name.
        preset: String,
    },
    /// Text that is not a mesh.
    #[error(
        "invalid mesh `{text}`: {reason}; write DPxSP such as `2x4`, DPxSPxTP, or axes such as `dp=2,sp=4` or `pp=2,dp=2,sp=2,tp=2`"
    )]
    Notation {
        /// The text.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
}
