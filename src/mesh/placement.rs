//! The mesh of a training run: axes `dp` and `sp`, and the rank at each coordinate.

use super::{DeviceMesh, MeshError, MeshSpec, RankHosts};

/// A training mesh on its hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedMesh {
    /// The mesh, with the axes `dp` and `sp`.
    pub mesh: DeviceMesh,
    /// The nodes that an sp group spans.
    pub sp_groups: SpGroups,
}

/// The placement of the sp groups, which communicate in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpGroups {
    /// No group spans more nodes than it must, as far as is known.
    Compact,
    /// Row-major ranks would span more nodes: ranks are ordered by node instead.
    Reordered {
        /// Nodes of a group in the order of the ranks.
        before: usize,
        /// Nodes of a group in this mesh.
        after: usize,
    },
    /// The mesh was given with an order in which groups span more nodes than they must.
    Scattered {
        /// Nodes of a group.
        nodes: usize,
        /// Nodes that would be enough.
        needed: usize,
    },
}

impl PlacedMesh {
    /// Arranges ranks on a mesh of `dp` × `sp`: by `spec` if it is resolved and has an order of its own, else row-major.
    /// Row-major ranks whose sp groups span more nodes than ranks ordered by node are ordered by node.
    ///
    /// Without `hosts`, the nodes of a hybrid shape have consecutive ranks.
    ///
    /// # Errors
    /// Fails if a hybrid shape does not fit the hosts, or the mesh is invalid.
    pub fn new(
        (dp, sp): (usize, usize),
        spec: Option<&MeshSpec>,
        hosts: Option<&RankHosts>,
    ) -> Result<Self, MeshError> {
        let flat = DeviceMesh::dp_sp(dp, sp)?;
        let hosts = hosts.filter(|hosts| hosts.num_nodes() > 1 && hosts.world_size() == flat.world_size());
        let ordered = |ranks| DeviceMesh::with_ranks(&dp_sp(&flat), ranks);
        let given = match spec {
            None | Some(MeshSpec::Axes(_)) => None,
            Some(spec) => Some(ordered(spec.ranks(hosts)?)?),
        };
        let Some(hosts) = hosts else {
            return Ok(Self { mesh: given.unwrap_or(flat), sp_groups: SpGroups::Compact });
        };
        if let Some(mesh) = given {
            let nodes = hosts.nodes_spanned(&mesh, "sp")?;
            let scattered = needed(sp, hosts).filter(|needed| *needed < nodes);
            let sp_groups = scattered.map(|needed| SpGroups::Scattered { nodes, needed });
            return Ok(Self { mesh, sp_groups: sp_groups.unwrap_or(SpGroups::Compact) });
        }
        let by_node = ordered(hosts.ranks_by_node())?;
        let (before, after) = (hosts.nodes_spanned(&flat, "sp")?, hosts.nodes_spanned(&by_node, "sp")?);
        Ok(match after < before {
            true => Self { mesh: by_node, sp_groups: SpGroups::Reordered { before, after } },
            false => Self { mesh: flat, sp_groups: SpGroups::Compact },
        })
    }
}

fn dp_sp(mesh: &DeviceMesh) -> [(&'static str, i64); 2] {
    let size = |index: usize| i64::try_from(mesh.shape()[index]).unwrap_or(i64::MAX);
    [("dp", size(0)), ("sp", size(1))]
}

/// Returns the number of nodes that every sp group can be kept on; `None` if groups cannot all be cut alike.
fn needed(sp: usize, hosts: &RankHosts) -> Option<usize> {
    let ranks_per_node = hosts.cluster().ok()?.ranks_per_node;
    if ranks_per_node.is_multiple_of(sp) {
        return Some(1);
    }
    sp.is_multiple_of(ranks_per_node).then(|| sp / ranks_per_node)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(sizes: (usize, usize), text: Option<&str>, hosts: &[&str]) -> Result<PlacedMesh, MeshError> {
        let hosts = RankHosts::new(hosts);
        let cluster = hosts.cluster().ok();
        let spec = text.map(|text| MeshSpec::parse(text).unwrap().resolve(cluster).unwrap());
        PlacedMesh::new(sizes, spec.as_ref(), Some(&hosts))
    }

    #[test]
    fn row_major_ranks_are_ordered_by_node_only_where_that_helps() {
        let round_robin = ["a", "b", "a", "b"];
        let repaired = placed((2, 2), None, &round_robin).unwrap();
        assert_eq!(repaired.mesh.all_groups("sp").unwrap(), [[0, 2], [1, 3]]);
        assert_eq!(repaired.sp_groups, SpGroups::Reordered { before: 2, after: 1 });
        // Four ranks on two nodes of two always span both, and dp alone has no sp group to keep.
        for sizes in [(1, 4), (4, 1)] {
            let placed = placed(sizes, None, &round_robin).unwrap();
            assert_eq!(placed.mesh, DeviceMesh::dp_sp(sizes.0, sizes.1).unwrap());
            assert_eq!(placed.sp_groups, SpGroups::Compact);
        }
        let blocks = placed((2, 2), Some("2x2"), &["a", "a", "b", "b"]).unwrap();
        assert_eq!((blocks.mesh.ranks(), blocks.sp_groups), (&[0, 1, 2, 3][..], SpGroups::Compact));
        // Unequal nodes serve a plain mesh.
        let unequal = placed((3, 1), None, &["a", "b", "a"]).unwrap();
        assert_eq!(unequal.mesh.ranks(), [0, 1, 2]);
    }

    #[test]
    fn hybrid_shapes_follow_the_hosts_and_scattered_groups_are_reported() {
        let round_robin = ["a", "b", "a", "b"];
        let within = placed((2, 2), Some("intra:sp=2/inter:dp=2"), &round_robin).unwrap();
        assert_eq!((within.mesh.ranks(), within.sp_groups), (&[0, 2, 1, 3][..], SpGroups::Compact));
        let across = placed((2, 2), Some("intra:dp=2/inter:sp=2"), &round_robin).unwrap();
        assert_eq!(across.mesh.all_groups("sp").unwrap(), [[0, 1], [2, 3]]);
        assert_eq!(across.sp_groups, SpGroups::Scattered { nodes: 2, needed: 1 });
        let map = placed((2, 2), Some("dp=2,sp=2@0,1,2,3"), &round_robin).unwrap();
        assert_eq!(map.sp_groups, SpGroups::Scattered { nodes: 2, needed: 1 });
        assert_eq!(map.mesh.ranks(), [0, 1, 2, 3], "a rank map is not changed");
    }

    #[test]
    fn a_hybrid_shape_for_other_nodes_is_an_error_that_names_them() {
        let spec = MeshSpec::parse("intra:sp=4/inter:dp=1").unwrap().resolve(None).unwrap();
        let error = |hosts: &[&str]| {
            let error = PlacedMesh::new((1, 4), Some(&spec), Some(&RankHosts::new(hosts))).unwrap_err();
            error.to_string()
        };
        assert!(error(&["a", "a", "b", "b"]).contains("are on a: 2 ranks, b: 2 ranks"));
        assert!(error(&["a", "a", "a", "b"]).contains("(a: 3 ranks, b: 1 rank)"));
        // On one host, consecutive ranks stand for the nodes.
        let one_host = RankHosts::new(&["a"; 4]);
        let spec = MeshSpec::parse("intra:dp=2/inter:sp=2").unwrap().resolve(None).unwrap();
        let placed = PlacedMesh::new((2, 2), Some(&spec), Some(&one_host)).unwrap();
        assert_eq!((placed.mesh.ranks(), placed.sp_groups), (&[0, 2, 1, 3][..], SpGroups::Compact));
    }
}
