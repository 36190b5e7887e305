//! Axis sizes as they are stated, and the shapes that they give on a cluster.

use super::axis_names::AXIS_ORDER;
use super::{Axis, Cluster, DeviceMesh, HybridMeshShape, MeshError, StatedAxis};

pub(super) type Axes = Vec<StatedAxis>;

/// Returns the axes as they could be stated.
pub(super) fn stated(axes: &[Axis]) -> Axes {
    axes.iter().map(StatedAxis::from).collect()
}

/// Returns the place of an axis among others; unknown ones keep their order, in the place of `dp`.
pub(super) fn place(name: &str) -> usize {
    let position = |name: &str| AXIS_ORDER.iter().position(|axis| *axis == name);
    position(name).or_else(|| position("dp")).unwrap_or_default()
}

/// Infers a size of -1; without one, the sizes determine the number of ranks.
pub(super) fn resolve_axes(axes: &[StatedAxis], world_size: Option<usize>) -> Result<Axes, MeshError> {
    let mesh = match DeviceMesh::new(axes, None) {
        Err(MeshError::InferWithoutWorldSize { .. }) => DeviceMesh::new(axes, world_size)?,
        parsed => parsed?,
    };
    Ok(stated(mesh.axes()))
}

/// Builds a hybrid shape on a cluster of several nodes, or on the nodes that its own sizes give.
pub(super) fn hybrid_shape(
    intra: &[StatedAxis],
    inter: &[StatedAxis],
    cluster: Option<Cluster>,
) -> Result<HybridMeshShape, MeshError> {
    let mut names: Vec<&str> = Vec::new();
    for (index, Axis { name, .. }) in intra.iter().chain(inter).enumerate() {
        let side = if index < intra.len() { &intra[..index] } else { &inter[..index - intra.len()] };
        if side.iter().any(|earlier| earlier.name == *name) {
            return Err(MeshError::DuplicateName { name: name.clone() });
        }
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    // A stable sort keeps the order of other axes.
    names.sort_by_key(|name| place(name));
    let sizes = |side: &[StatedAxis]| -> Vec<i64> {
        let size = |name: &&str| side.iter().find(|axis| axis.name == **name).map_or(1, |axis| axis.size);
        names.iter().map(size).collect()
    };
    let (intra, inter) = (sizes(intra), sizes(inter));
    let cluster = match cluster.filter(|cluster| cluster.nodes > 1) {
        Some(cluster) => cluster,
        None => own_cluster(&names, &intra, &inter, cluster.map(Cluster::world_size))?,
    };
    HybridMeshShape::new(&names, &intra, &inter, cluster)
}

/// Returns the cluster of stated sizes. The side without a -1 gives the other side's ranks.
fn own_cluster(
    names: &[&str],
    intra: &[i64],
    inter: &[i64],
    world_size: Option<usize>,
) -> Result<Cluster, MeshError> {
    let product = |sizes: &[i64]| {
        sizes.iter().try_fold(1_usize, |product, &size| product.checked_mul(usize::try_from(size).ok()?))
    };
    let divided = |known: usize, missing: &[i64]| {
        let Some(total) = world_size else {
            let axis = names.iter().zip(missing).find(|(_, size)| **size < 0);
            let axis = axis.map_or_else(String::new, |(name, _)| (*name).to_owned());
            return Err(MeshError::InferWithoutWorldSize { axis });
        };
        Ok(total / known.max(1))
    };
    let (nodes, ranks_per_node) = match (product(inter), product(intra)) {
        (Some(nodes), Some(ranks_per_node)) => (nodes, ranks_per_node),
        (Some(nodes), None) => (nodes, divided(nodes, intra)?),
        (None, Some(ranks_per_node)) => (divided(ranks_per_node, inter)?, ranks_per_node),
        (None, None) => (1, divided(1, intra)?),
    };
    Ok(Cluster { nodes, ranks_per_node })
}
