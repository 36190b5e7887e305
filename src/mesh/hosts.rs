//! The host of every rank.

use super::{Cluster, Device, DeviceMesh, MeshError};

/// Maximum number of hosts that a message lists.
const MAX_LISTED: usize = 8;

/// The hosts of a job's ranks. Hosts are nodes, numbered by their lowest rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankHosts {
    /// Names of the nodes.
    names: Vec<String>,
    /// The node of each rank.
    nodes: Vec<usize>,
}

impl RankHosts {
    /// Creates the hosts from the name of each rank's host, in rank order.
    pub fn new<S: AsRef<str>>(host_of_rank: &[S]) -> Self {
        let mut names: Vec<String> = Vec::new();
        let nodes = host_of_rank.iter().map(|host| {
            let host = host.as_ref();
            names.iter().position(|name| name == host).unwrap_or_else(|| {
                names.push(host.to_owned());
                names.len() - 1
            })
        });
        let nodes = nodes.collect();
        Self { names, nodes }
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the number of nodes.
    pub fn num_nodes(&self) -> usize {
        self.names.len()
    }

    /// Returns the node of a rank.
    pub fn node_of(&self, rank: usize) -> Option<usize> {
        self.nodes.get(rank).copied()
    }

    /// Returns the nodes as a cluster.
    ///
    /// # Errors
    /// Fails with the names of the nodes if they have different numbers of ranks.
    pub fn cluster(&self) -> Result<Cluster, MeshError> {
        let sizes = self.node_sizes();
        let ranks_per_node = sizes.first().copied().unwrap_or(0);
        match sizes.iter().all(|size| *size == ranks_per_node) {
            true => Ok(Cluster { nodes: sizes.len(), ranks_per_node }),
            false => Err(MeshError::UnequalNodes { nodes: self.to_string() }),
        }
    }

    /// Returns every rank with its node.
    pub fn devices(&self) -> Vec<Device> {
        self.nodes.iter().enumerate().map(|(rank, &node)| Device { rank, node }).collect()
    }

    /// Returns all ranks, ordered by node, then by rank.
    pub fn ranks_by_node(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> = (0..self.world_size()).collect();
        // A stable sort keeps the order of a node's ranks.
        ranks.sort_by_key(|&rank| self.nodes[rank]);
        ranks
    }

    /// Returns the maximum number of nodes that a group along an axis spans.
    ///
    /// # Errors
    /// Fails if the mesh has no such axis.
    pub fn nodes_spanned(&self, mesh: &DeviceMesh, axis: &str) -> Result<usize, MeshError> {
        let nodes_of = |group: &Vec<usize>| {
            let mut nodes: Vec<_> = group.iter().map(|&rank| self.node_of(rank)).collect();
            nodes.sort_unstable();
            nodes.dedup();
            nodes.len()
        };
        Ok(mesh.all_groups(axis)?.iter().map(nodes_of).max().unwrap_or(0))
    }

    /// Returns the mesh as if ranks were numbered by node: consecutive ranks then share a node.
    ///
    /// # Errors
    /// Fails if the mesh has a rank without a host.
    pub fn renumbered(&self, mesh: &DeviceMesh) -> Result<DeviceMesh, MeshError> {
        let mut number = vec![0; self.world_size()];
        self.ranks_by_node().into_iter().enumerate().for_each(|(position, rank)| number[rank] = position);
        let renumber = |rank: &usize| {
            number
                .get(*rank)
                .copied()
                .ok_or_else(|| MeshError::NotAMember { rank: *rank, members: format!("those of {self}") })
        };
        let ranks = mesh.ranks().iter().map(renumber).collect::<Result<_, _>>()?;
        DeviceMesh::from_parts(mesh.axes().to_vec(), ranks)
    }

    fn node_sizes(&self) -> Vec<usize> {
        let mut sizes = vec![0; self.names.len()];
        self.nodes.iter().for_each(|&node| sizes[node] += 1);
        sizes
    }
}

/// Writes `n0: 4 ranks, n1: 3 ranks`.
impl std::fmt::Display for RankHosts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let nodes = self.names.iter().zip(self.node_sizes()).take(MAX_LISTED);
        let listed: Vec<_> = nodes
            .map(|(name, ranks)| format!("{name}: {ranks} rank{}", if ranks == 1 { "" } else { "s" }))
            .collect();
        f.write_str(&listed.join(", "))?;
        match self.names.len().saturating_sub(MAX_LISTED) {
            0 => Ok(()),
            more => write!(f, ", and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_numbered_by_their_lowest_rank_and_unequal_ones_are_named() {
        let hosts = RankHosts::new(&["b", "a", "b", "a"]);
        assert_eq!((hosts.num_nodes(), hosts.node_of(1), hosts.node_of(4)), (2, Some(1), None));
        assert_eq!(hosts.cluster(), Ok(Cluster { nodes: 2, ranks_per_node: 2 }));
        assert_eq!(hosts.ranks_by_node(), [0, 2, 1, 3]);
        assert_eq!(hosts.devices()[3], Device { rank: 3, node: 1 });
        let error = RankHosts::new(&["n0", "n0", "n1"]).cluster().unwrap_err().to_string();
        assert!(error.contains("(n0: 2 ranks, n1: 1 rank)"), "{error}");
        let many: Vec<String> = (0..10).map(|node| format!("n{node}")).collect();
        assert!(RankHosts::new(&many).to_string().ends_with("n7: 1 rank, and 2 more"));
    }

    #[test]
    fn a_renumbered_mesh_has_consecutive_ranks_on_each_node() {
        let hosts = RankHosts::new(&["a", "b", "a", "b"]);
        let flat = DeviceMesh::dp_sp(2, 2).unwrap();
        assert_eq!(hosts.nodes_spanned(&flat, "sp"), Ok(2));
        assert_eq!(hosts.renumbered(&flat).unwrap().ranks(), [0, 2, 1, 3]);
        let by_node = DeviceMesh::with_ranks(&[("dp", 2), ("sp", 2)], vec![0, 2, 1, 3]).unwrap();
        assert_eq!(hosts.nodes_spanned(&by_node, "sp"), Ok(1));
        assert_eq!(hosts.renumbered(&by_node), Ok(flat));
        assert!(hosts.renumbered(&DeviceMesh::dp_sp(3, 2).unwrap()).is_err());
    }
}
