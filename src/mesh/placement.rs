//! The mesh of a training run: axes `pp`, `dp`, `sp` and `tp`, and the rank at each coordinate.

use super::{DeviceMesh, MeshError, MeshSpec, RankHosts, TP_AXIS};

/// A training mesh on its hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedMesh {
    /// The mesh, with the axes `dp` and `sp` and, if they have more than one rank, `pp` and `tp`.
    pub mesh: DeviceMesh,
    /// The nodes that an sp group, or a tp group, spans.
    pub sp_groups: SpGroups,
}

/// The placement of the groups that communicate in every layer: along sp and tp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpGroups {
    /// No group spans more nodes than it must, as far as is known.
    Compact,
    /// Row-major ranks would span more nodes: ranks are ordered by node instead.
    Reordered {
        /// The axis of the groups.
        axis: &'static str,
        /// Nodes of a group in the order of the ranks.
        before: usize,
        /// Nodes of a group in this mesh.
        after: usize,
    },
    /// The mesh was given with an order in which groups span more nodes than they must.
    Scattered {
        /// The axis of the groups.
        axis: &'static str,
        /// Nodes of a group.
        nodes: usize,
        /// Nodes that would be enough.
        needed: usize,
    },
}

impl PlacedMesh {
    /// Arranges the ranks of a row-major training mesh: by `spec` if it is resolved and has an order of its own, else as they
    /// are. Row-major ranks whose tp or sp groups span more nodes than ranks ordered by node are ordered by node.
    ///
    /// Without `hosts`, the nodes of a hybrid shape have consecutive ranks.
    ///
    /// # Errors
    /// Fails if a hybrid shape does not fit the hosts, or the mesh is invalid.
    pub fn new(
        flat: DeviceMesh,
        spec: Option<&MeshSpec>,
        hosts: Option<&RankHosts>,
    ) -> Result<Self, MeshError> {
        let hosts = hosts.filter(|hosts| hosts.num_nodes() > 1 && hosts.world_size() == flat.world_size());
        let ordered = |ranks| DeviceMesh::with_ranks(flat.axes(), ranks);
        let given = match spec {
            None | Some(MeshSpec::Axes(_)) => None,
            Some(spec) => Some(ordered(spec.ranks(hosts)?)?),
        };
        let Some(hosts) = hosts else {
            return Ok(Self { mesh: given.unwrap_or(flat), sp_groups: SpGroups::Compact });
        };
        // Groups of tp communicate most.
        let axes: Vec<&'static str> =
            [TP_AXIS, "sp"].into_iter().filter(|axis| flat.has_axis(axis)).collect();
        let spanned = |mesh: &DeviceMesh| -> Result<Vec<usize>, MeshError> {
            axes.iter().map(|axis| hosts.nodes_spanned(mesh, axis)).collect()
        };
        if let Some(mesh) = given {
            let scattered = axes.iter().zip(spanned(&mesh)?).find_map(|(&axis, nodes)| {
                let needed = needed(&flat, axis, hosts).filter(|needed| *needed < nodes)?;
                Some(SpGroups::Scattered { axis, nodes, needed })
            });
            return Ok(Self { mesh, sp_groups: scattered.unwrap_or(SpGroups::Compact) });
        }
        let by_node = ordered(hosts.ranks_by_node())?;
        let mut nodes = axes.iter().copied().zip(spanned(&flat)?.into_iter().zip(spanned(&by_node)?));
        Ok(match nodes.find(|(_, (before, after))| before != after) {
            Some((axis, (before, after))) if after < before => {
                Self { mesh: by_node, sp_groups: SpGroups::Reordered { axis, before, after } }
            }
            _ => Self { mesh: flat, sp_groups: SpGroups::Compact },
        })
    }
}

/// Returns the fewest nodes that can hold any one group along an axis of a row-major mesh; `None` if groups cannot
/// all be cut alike.
fn needed(mesh: &DeviceMesh, axis: &str, hosts: &RankHosts) -> Option<usize> {
    let ranks_per_node = hosts.cluster().ok()?.ranks_per_node;
    let size = mesh.axis_size(axis).ok()?;
    let stride = if axis == TP_AXIS { 1 } else { mesh.axis_size(TP_AXIS).unwrap_or(1) };
    if !ranks_per_node.is_multiple_of(stride) && !stride.is_multiple_of(ranks_per_node) {
        return None;
    }
    let of_node = (ranks_per_node / stride).max(1);
    if of_node.is_multiple_of(size) {
        return Some(1);
    }
    size.is_multiple_of(of_node).then(|| size / of_node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::MeshShape;

    fn placed([dp, sp, tp]: [usize; 3], text: Option<&str>, hosts: &[&str]) -> Result<PlacedMesh, MeshError> {
        let hosts = RankHosts::new(hosts);
        let cluster = hosts.cluster().ok();
        let spec = text.map(|text| MeshSpec::parse(text).unwrap().resolve(cluster).unwrap());
        PlacedMesh::new(
            MeshShape { tp, ..MeshShape::dp_sp(dp, sp) }.row_major()?,
            spec.as_ref(),
            Some(&hosts),
        )
    }

    #[test]
    fn row_major_ranks_are_ordered_by_node_only_where_that_helps() {
        let round_robin = ["a", "b", "a", "b"];
        let repaired = placed([2, 2, 1], None, &round_robin).unwrap();
        assert_eq!(repaired.mesh.all_groups("sp").unwrap(), [[0, 2], [1, 3]]);
        assert_eq!(repaired.sp_groups, SpGroups::Reordered { axis: "sp", before: 2, after: 1 });
        // Four ranks on two nodes of two always span both, and dp alone has no sp group to keep.
        for (dp, sp) in [(1, 4), (4, 1)] {
            let placed = placed([dp, sp, 1], None, &round_robin).unwrap();
            assert_eq!(placed.mesh, DeviceMesh::dp_sp(dp, sp).unwrap());
            assert_eq!(placed.sp_groups, SpGroups::Compact);
        }
        let blocks = placed([2, 2, 1], Some("2x2"), &["a", "a", "b", "b"]).unwrap();
        assert_eq!((blocks.mesh.ranks(), blocks.sp_groups), (&[0, 1, 2, 3][..], SpGroups::Compact));
        // Unequal nodes serve a plain mesh.
        let unequal = placed([3, 1, 1], None, &["a", "b", "a"]).unwrap();
        assert_eq!(unequal.mesh.ranks(), [0, 1, 2]);
    }

    #[test]
    fn hybrid_shapes_follow_the_hosts_and_scattered_groups_are_reported() {
        let round_robin = ["a", "b", "a", "b"];
        let within = placed([2, 2, 1], Some("intra:sp=2/inter:dp=2"), &round_robin).unwrap();
        assert_eq!((within.mesh.ranks(), within.sp_groups), (&[0, 2, 1, 3][..], SpGroups::Compact));
        let across = placed([2, 2, 1], Some("intra:dp=2/inter:sp=2"), &round_robin).unwrap();
        assert_eq!(across.mesh.all_groups("sp").unwrap(), [[0, 1], [2, 3]]);
        assert_eq!(across.sp_groups, SpGroups::Scattered { axis: "sp", nodes: 2, needed: 1 });
        let map = placed([2, 2, 1], Some("dp=2,sp=2@0,1,2,3"), &round_robin).unwrap();
        assert_eq!(map.sp_groups, SpGroups::Scattered { axis: "sp", nodes: 2, needed: 1 });
        assert_eq!(map.mesh.ranks(), [0, 1, 2, 3], "a rank map is not changed");
    }

    #[test]
    fn tp_groups_are_kept_on_a_node_before_sp_groups() {
        let round_robin = ["a", "b", "a", "b"];
        let by_node = placed([1, 2, 2], None, &round_robin).unwrap();
        assert_eq!(by_node.mesh.all_groups("tp").unwrap(), [[0, 2], [1, 3]]);
        assert_eq!(by_node.sp_groups, SpGroups::Reordered { axis: "tp", before: 2, after: 1 });
        let across = placed([1, 2, 2], Some("intra:sp=2/inter:tp=2"), &round_robin).unwrap();
        assert_eq!(across.mesh.all_groups("tp").unwrap(), [[0, 1], [2, 3]]);
        assert_eq!(across.sp_groups, SpGroups::Scattered { axis: "tp", nodes: 2, needed: 1 });
        // An sp group of ranks two apart needs both nodes.
        let within = placed([1, 2, 2], Some("intra:tp=2/inter:sp=2"), &round_robin).unwrap();
        assert_eq!((within.mesh.ranks(), within.sp_groups), (&[0, 2, 1, 3][..], SpGroups::Compact));
    }

    #[test]
    fn a_hybrid_shape_for_other_nodes_is_an_error_that_names_them() {
        let spec = MeshSpec::parse("intra:sp=4/inter:dp=1").unwrap().resolve(None).unwrap();
        let error = |hosts: &[&str]| {
            let error =
                PlacedMesh::new(DeviceMesh::dp_sp(1, 4).unwrap(), Some(&spec), Some(&RankHosts::new(hosts)))
                    .unwrap_err();
            error.to_string()
        };
        assert!(error(&["a", "a", "b", "b"]).contains("are on a: 2 ranks, b: 2 ranks"));
        assert!(error(&["a", "a", "a", "b"]).contains("(a: 3 ranks, b: 1 rank)"));
        // On one host, consecutive ranks stand for the nodes.
        let one_host = RankHosts::new(&["a"; 4]);
        let spec = MeshSpec::parse("intra:dp=2/inter:sp=2").unwrap().resolve(None).unwrap();
        let flat = DeviceMesh::dp_sp(2, 2).unwrap();
        let placed = PlacedMesh::new(flat, Some(&spec), Some(&one_host)).unwrap();
        assert_eq!((placed.mesh.ranks(), placed.sp_groups), (&[0, 2, 1, 3][..], SpGroups::Compact));
    }
}
