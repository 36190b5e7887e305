//! Meshes over several nodes, with fast links within a node and slower links between nodes.
//!
//! JAX and axlearn call the two ICI and DCN.

use super::{Axis, DeviceMesh, MeshError, StatedAxis, axis, num_ranks, resolve_axes};
use std::collections::BTreeMap;

/// A cluster of nodes with the same number of ranks each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cluster {
    /// Number of nodes.
    pub nodes: usize,
    /// Ranks per node.
    pub ranks_per_node: usize,
}

impl Cluster {
    /// Returns the total number of ranks.
    pub fn world_size(self) -> usize {
        self.nodes.saturating_mul(self.ranks_per_node)
    }
}

/// A device of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Global rank.
    pub rank: usize,
    /// Index of its node.
    pub node: usize,
}

/// A mesh shape as the product of a shape within a node and a shape between nodes.
///
/// Along a split axis, ranks of the same node are adjacent:
///
/// ```
/// use ulysses::mesh::{Cluster, HybridMeshShape};
///
/// let cluster = Cluster { nodes: 2, ranks_per_node: 8 };
/// let shape = HybridMeshShape::new(&["dp", "sp"], &[2, 4], &[1, 2], cluster)?;
/// let mesh = shape.mesh()?;
/// assert_eq!(mesh.shape(), [2, 8]);
/// assert_eq!(mesh.ranks()[..8], [0, 1, 2, 3, 8, 9, 10, 11]);
/// assert_eq!(mesh.ranks()[8..], [4, 5, 6, 7, 12, 13, 14, 15]);
/// # Ok::<(), ulysses::mesh::MeshError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HybridMeshShape {
    intra: Vec<Axis>,
    /// The same axes.
    inter: Vec<Axis>,
}

impl HybridMeshShape {
    /// Creates a shape from the axis sizes within a node and between nodes.
    ///
    /// One size of each list may be `-1`, which is inferred from the cluster.
    ///
    /// # Errors
    /// Fails if an axis lacks a name or a size, or the products of the sizes are not the ranks per node and the
    /// number of nodes.
    pub fn new(
        axis_names: &[&str],
        intra: &[i64],
        inter: &[i64],
        cluster: Cluster,
    ) -> Result<Self, MeshError> {
        let (axes, intra_len, inter_len) = (axis_names.len(), intra.len(), inter.len());
        if intra_len != axes || inter_len != axes {
            return Err(MeshError::HybridLengths { axes, intra: intra_len, inter: inter_len });
        }
        let stated = |sizes: &[i64]| -> Vec<StatedAxis> {
            axis_names.iter().zip(sizes).map(|(name, size)| Axis::new(*name, *size)).collect()
        };
        let intra = resolve_side("within a node", &stated(intra), cluster.ranks_per_node)?;
        let inter = resolve_side("between nodes", &stated(inter), cluster.nodes)?;
        Ok(Self { intra, inter })
    }

    /// Returns the axes within a node, aliases of names resolved.
    pub fn intra(&self) -> &[Axis] {
        &self.intra
    }

    /// Returns the same axes between nodes.
    pub fn inter(&self) -> &[Axis] {
        &self.inter
    }

    /// Returns the axes of the whole mesh.
    pub fn axes(&self) -> Vec<Axis> {
        let sides = self.intra.iter().zip(&self.inter);
        sides.map(|(intra, inter)| Axis::new(&intra.name, intra.size * inter.size)).collect()
    }

    /// Returns the number of ranks per node.
    pub fn ranks_per_node(&self) -> usize {
        self.intra.iter().map(|axis| axis.size).product()
    }

    /// Returns the number of nodes.
    pub fn nodes(&self) -> usize {
        self.inter.iter().map(|axis| axis.size).product()
    }

    /// Returns the mesh for consecutive ranks on each node.
    ///
    /// With L ranks per node, position `local` of node `node` has rank `node · L + local`, both row-major.
    ///
    /// # Errors
    /// Fails if the mesh has more than [`MAX_RANKS`](super::MAX_RANKS) ranks.
    pub fn mesh(&self) -> Result<DeviceMesh, MeshError> {
        self.arrange(|NodePosition { node, local }| node * self.ranks_per_node() + local)
    }

    /// Returns the mesh over the given devices, in any order. Nodes are sorted by index, devices of a node by rank.
    ///
    /// # Errors
    /// Fails if the number of nodes or of devices per node differs from the shape, or a rank is listed twice.
    pub fn mesh_over(&self, devices: &[Device]) -> Result<DeviceMesh, MeshError> {
        let mut by_node: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for device in devices {
            by_node.entry(device.node).or_default().push(device.rank);
        }
        let (nodes, ranks_per_node) = (self.nodes(), self.ranks_per_node());
        if by_node.len() != nodes {
            return Err(MeshError::NodeCount { nodes, found: by_node.len() });
        }
        for (&node, ranks) in &mut by_node {
            if ranks.len() != ranks_per_node {
                return Err(MeshError::UnevenNode { node, ranks_per_node, found: ranks.len() });
            }
            ranks.sort_unstable();
        }
        let by_node: Vec<Vec<usize>> = by_node.into_values().collect();
        self.arrange(|NodePosition { node, local }| by_node[node][local])
    }

    /// Builds the mesh from the rank at each local position of each node.
    fn arrange(&self, rank: impl Fn(NodePosition) -> usize) -> Result<DeviceMesh, MeshError> {
        let axes = self.axes();
        let ranks = (0..num_ranks(&axes)?).map(|position| rank(self.node_position(position)));
        DeviceMesh::with_ranks(&axes, ranks.collect())
    }

    /// Returns the place of a mesh position.
    fn node_position(&self, mut position: usize) -> NodePosition {
        let (mut node, mut local) = (0, 0);
        let (mut node_stride, mut local_stride) = (1, 1);
        for (intra, inter) in self.intra.iter().zip(&self.inter).rev() {
            let coordinate = position % (intra.size * inter.size);
            position /= intra.size * inter.size;
            local += coordinate % intra.size * local_stride;
            node += coordinate / intra.size * node_stride;
            local_stride *= intra.size;
            node_stride *= inter.size;
        }
        NodePosition { node, local }
    }
}

/// The place of a rank: its node, and its position there, both row-major.
struct NodePosition {
    node: usize,
    local: usize,
}

/// Resolves the sizes within a node or between nodes; their product must be `total`.
fn resolve_side(side: &'static str, axes: &[StatedAxis], total: usize) -> Result<Vec<Axis>, MeshError> {
    let resolved = resolve_axes(axes, Some(total)).and_then(|axes| match num_ranks(&axes)? {
        product if product == total => Ok(axes),
        product => Err(MeshError::WorldSizeMismatch { mesh: axis::list(&axes), product, world_size: total }),
    });
    resolved.map_err(|source| MeshError::Side { side, source: Box::new(source) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 3] = ["pp", "dp", "sp"];

    #[test]
    fn both_sides_infer_one_size_and_errors_name_the_side() {
        let cluster = Cluster { nodes: 4, ranks_per_node: 8 };
        let new = |intra: &[i64], inter: &[i64]| HybridMeshShape::new(&["dp", "sp"], intra, inter, cluster);
        let shape = new(&[-1, 4], &[2, -1]).unwrap();
        let axes = |dp: usize, sp: usize| vec![Axis::new("dp", dp), Axis::new("sp", sp)];
        assert_eq!(
            (shape.intra(), shape.inter(), shape.axes()),
            (&axes(2, 4)[..], &axes(2, 2)[..], axes(4, 8))
        );
        assert_eq!((shape.nodes(), shape.ranks_per_node()), (4, 8));
        let message = |intra: &[i64], inter: &[i64]| new(intra, inter).unwrap_err().to_string();
        assert!(message(&[2, 2], &[2, 2]).starts_with("within a node: mesh dp=2,sp=2 needs 4 ranks"));
        assert!(message(&[2, 4], &[2, 3]).starts_with("between nodes: mesh dp=2,sp=3 needs 6 ranks"));
        assert!(message(&[-1, -1], &[4, 1]).starts_with("within a node: axes dp, sp have size -1"));
        assert!(message(&[8], &[4, 1]).contains("2 axes, 1 size(s) within a node and 2 between nodes"));
    }

    #[test]
    fn coordinates_follow_the_shapes_within_and_between_nodes() {
        // Expected coordinates are written out, independent of the implementation's formula.
        let cluster = Cluster { nodes: 6, ranks_per_node: 8 };
        let shape = HybridMeshShape::new(&NAMES, &[2, 1, 4], &[1, 3, 2], cluster).unwrap();
        let mesh = shape.mesh().unwrap();
        assert_eq!(mesh.shape(), [2, 3, 8]);
        for rank in 0..48 {
            let (node, local) = (rank / 8, rank % 8);
            let expected = [local / 4, node / 2, node % 2 * 4 + local % 4];
            assert_eq!(mesh.coordinate(rank).unwrap(), expected, "rank {rank}");
        }
    }

    #[test]
    fn devices_may_be_in_any_order() {
        let cluster = Cluster { nodes: 2, ranks_per_node: 4 };
        let shape = HybridMeshShape::new(&["dp", "sp"], &[2, 2], &[2, 1], cluster).unwrap();
        let device = |rank: usize| Device { rank, node: rank / 4 };
        let in_order: Vec<Device> = (0..8).map(device).collect();
        let shuffled: Vec<Device> = [5, 0, 7, 2, 1, 6, 3, 4].map(device).to_vec();
        assert_eq!(shape.mesh_over(&shuffled), shape.mesh());
        assert_eq!(shape.mesh_over(&in_order), shape.mesh());
        // A scheduler's round-robin placement: ranks 0, 2, 4, 6 on node 10, the others on node 11.
        let round_robin: Vec<Device> = (0..8).map(|rank| Device { rank, node: 10 + rank % 2 }).collect();
        assert_eq!(shape.mesh_over(&round_robin).unwrap().ranks(), [0, 2, 4, 6, 1, 3, 5, 7]);
        let error = shape.mesh_over(&in_order[..7]).unwrap_err();
        assert_eq!(error, MeshError::UnevenNode { node: 1, ranks_per_node: 4, found: 3 });
        assert_eq!(shape.mesh_over(&in_order[..4]), Err(MeshError::NodeCount { nodes: 2, found: 1 }));
        let twice: Vec<Device> = in_order[..7].iter().copied().chain([Device { rank: 6, node: 1 }]).collect();
        assert_eq!(shape.mesh_over(&twice), Err(MeshError::DuplicateRank { rank: 6 }));
    }
}
