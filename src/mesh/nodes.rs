//! Which nodes the groups of a mesh reach.

use super::draw::{WIDTH, list};
use super::{DeviceMesh, MeshError};
use std::collections::BTreeSet;
use std::fmt;
use std::fmt::Write as _;

/// Nodes that are listed before some are left out.
const MAX_NODES: usize = 12;

/// How far the groups along an axis reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reach {
    /// The axis.
    pub axis: String,
    /// Number of groups.
    pub groups: usize,
    /// Ranks of each.
    pub size: usize,
    /// Most nodes that a group is on.
    pub nodes: usize,
}

impl Reach {
    /// The reach of every axis, when ranks 0 to `ranks_per_node` - 1 are on the first node, as many on the next, and
    /// so on.
    ///
    /// # Errors
    /// None for a mesh as it comes out of this module.
    pub fn of_axes(mesh: &DeviceMesh, ranks_per_node: usize) -> Result<Vec<Self>, MeshError> {
        let reach = |axis: &String| {
            let groups = mesh.all_groups(axis)?;
            let nodes_of = |group: &Vec<usize>| {
                group.iter().map(|rank| rank / ranks_per_node.max(1)).collect::<BTreeSet<_>>().len()
            };
            let nodes = groups.iter().map(nodes_of).max().unwrap_or(0);
            Ok(Self { axis: axis.clone(), groups: groups.len(), size: mesh.axis_size(axis)?, nodes })
        };
        mesh.axis_names().iter().map(reach).collect()
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { axis, groups, size, nodes } = self;
        write!(f, "{axis}: {groups} group{} of {size}, ", if *groups == 1 { "" } else { "s" })?;
        match nodes {
            0 | 1 => f.write_str("within a node"),
            nodes => write!(f, "across {nodes} nodes"),
        }
    }
}

/// Draws which ranks are on which node, and which groups leave it: what [`draw`](super::draw) leaves out.
///
/// # Errors
/// As [`Reach::of_axes`].
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
    for reach in Reach::of_axes(mesh, ranks_per_node)? {
        let _ = writeln!(text, "{reach}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Cluster, HybridMeshShape};

    #[test]
    fn nodes_and_the_reach_of_axes_are_told() {
        let text = draw_nodes(&DeviceMesh::dp_sp(2, 4).unwrap(), 4).unwrap();
        assert_eq!(
            text,
            "
node  ranks
   0  [0 1 2 3]
   1  [4 5 6 7]

dp: 4 groups of 2, across 2 nodes
sp: 2 groups of 4, within a node
"
        );
    }

    #[test]
    fn the_reach_follows_the_rank_map() {
        let cluster = Cluster { nodes: 2, ranks_per_node: 8 };
        let shape = HybridMeshShape::new(&["dp", "sp"], &[2, 4], &[1, 2], cluster).unwrap();
        let reach = Reach::of_axes(&shape.mesh().unwrap(), 8).unwrap();
        assert_eq!(reach.iter().map(|reach| reach.nodes).collect::<Vec<_>>(), [1, 2]);
        let plain = Reach::of_axes(&DeviceMesh::dp_sp(2, 8).unwrap(), 8).unwrap();
        assert_eq!(plain.iter().map(|reach| reach.nodes).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn many_nodes_fit_a_terminal() {
        let text = draw_nodes(&DeviceMesh::dp_sp(64, 64).unwrap(), 64).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.lines().count() < 24 && text.contains("  63  [4032"), "{text}");
    }
}
