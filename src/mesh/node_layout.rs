//! The layout of ranks and groups on nodes.

use super::draw::{WIDTH, list};
use super::{Axis, DeviceMesh, MeshError};
use std::collections::BTreeSet;
use std::fmt;
use std::fmt::Write as _;

/// Maximum number of nodes that a drawing lists.
const MAX_NODES: usize = 12;

/// The number of nodes that the groups along an axis span.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AxisPlacement {
    /// The axis.
    pub axis: String,
    /// Number of groups.
    pub groups: usize,
    /// Ranks per group.
    pub size: usize,
    /// Maximum number of nodes that a group spans.
    pub nodes: usize,
}

impl AxisPlacement {
    /// Returns the placement of every axis, if each node has `ranks_per_node` consecutive ranks.
    ///
    /// # Errors
    /// Never fails for a mesh built by this module.
    pub fn of_mesh(mesh: &DeviceMesh, ranks_per_node: usize) -> Result<Vec<Self>, MeshError> {
        let placement = |Axis { name, size }: &Axis| {
            let groups = mesh.all_groups(name)?;
            let nodes_of = |group: &Vec<usize>| {
                group.iter().map(|rank| rank / ranks_per_node.max(1)).collect::<BTreeSet<_>>().len()
            };
            let nodes = groups.iter().map(nodes_of).max().unwrap_or(0);
            Ok(Self { axis: name.clone(), groups: groups.len(), size: *size, nodes })
        };
        mesh.axes().iter().map(placement).collect()
    }
}

impl fmt::Display for AxisPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { axis, groups, size, nodes } = self;
        write!(f, "{axis}: {groups} group{} of {size}, ", if *groups == 1 { "" } else { "s" })?;
        match nodes {
            0 | 1 => f.write_str("within a node"),
            nodes if *groups == 1 => write!(f, "across {nodes} nodes"),
            nodes => write!(f, "each across up to {nodes} nodes"),
        }
    }
}

/// Draws the ranks of each node and the number of nodes that the groups of each axis span.
///
/// Complements [`draw`](super::draw).
///
/// # Errors
/// Fails like [`AxisPlacement::of_mesh`].
pub fn draw_nodes(mesh: &DeviceMesh, ranks_per_node: usize) -> Result<String, MeshError> {
    let ranks_per_node = ranks_per_node.max(1);
    let mut ranks = mesh.ranks().to_vec();
    ranks.sort_unstable();
    let nodes: Vec<&[usize]> = ranks.chunk_by(|a, b| a / ranks_per_node == b / ranks_per_node).collect();
    let mut text = format!("\n{:>4}  ranks\n", "node");
    for (index, node) in nodes.iter().enumerate() {
        if nodes.len() > MAX_NODES && (MAX_NODES - 2..nodes.len() - 1).contains(&index) {
            if index == MAX_NODES - 2 {
                let _ = writeln!(text, "{:>4}", "…");
            }
            continue;
        }
        let number = node.first().map_or(0, |rank| rank / ranks_per_node);
        let _ = writeln!(text, "{number:>4}  {}", list(node, WIDTH - 6));
    }
    text.push('\n');
    for placement in AxisPlacement::of_mesh(mesh, ranks_per_node)? {
        let _ = writeln!(text, "{placement}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Cluster, HybridMeshShape};

    #[test]
    fn drawing_shows_nodes_and_axis_placement() {
        let text = draw_nodes(&DeviceMesh::dp_sp(2, 4).unwrap(), 4).unwrap();
        assert_eq!(
            text,
            "
node  ranks
   0  [0 1 2 3]
   1  [4 5 6 7]

dp: 4 groups of 2, each across up to 2 nodes
sp: 2 groups of 4, within a node
"
        );
    }

    #[test]
    fn axis_placement_follows_the_rank_map() {
        let cluster = Cluster { nodes: 2, ranks_per_node: 8 };
        let shape = HybridMeshShape::new(&["dp", "sp"], &[2, 4], &[1, 2], cluster).unwrap();
        let hybrid = AxisPlacement::of_mesh(&shape.mesh().unwrap(), 8).unwrap();
        assert_eq!(hybrid.iter().map(|axis| axis.nodes).collect::<Vec<_>>(), [1, 2]);
        let plain = AxisPlacement::of_mesh(&DeviceMesh::dp_sp(2, 8).unwrap(), 8).unwrap();
        assert_eq!(plain.iter().map(|axis| axis.nodes).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn many_nodes_fit_a_terminal() {
        let text = draw_nodes(&DeviceMesh::dp_sp(64, 64).unwrap(), 64).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.lines().count() < 24 && text.contains("  63  [4032"), "{text}");
    }
}
