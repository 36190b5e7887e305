//! Meshes derived from a mesh with groups: slices, and the reshapes of [`DeviceMesh`].

use super::MeshGroups;
use super::known_groups::KnownGroups;
use crate::comm::{AxisGroups, CommError, ProcessGroup};
use crate::mesh::{Axis, DeviceMesh, MeshError, ShardShape, StatedAxis, ULYSSES_AXIS};
use std::collections::HashSet;
use std::sync::Arc;

impl MeshGroups {
    /// The mesh over some axes that contains this rank, as in [`DeviceMesh::slice_for`], with the groups of this mesh:
    /// torch's `mesh["dp", "tp"]`. Creates nothing and communicates nothing.
    ///
    /// # Errors
    /// Those of [`DeviceMesh::slice`].
    pub fn slice(&self, axes: &[&str]) -> Result<Self, CommError> {
        let slices = self.meshes.iter().map(|mesh| mesh.slice(axes)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self::over(slices.concat(), self.known.clone(), self.device.clone()))
    }

    /// This mesh with several axes merged into one, as in [`DeviceMesh::flatten`]: torch's `_flatten`, if applied to a
    /// slice over these axes. Collective.
    ///
    /// # Errors
    /// Those of [`DeviceMesh::flatten`], [`CommError::MeshMismatch`] when ranks derive different meshes, and the errors
    /// of the collectives.
    pub fn flatten(&self, axes: &[&str], new_name: &str) -> Result<Self, CommError> {
        self.derive(self.known.clone(), |mesh| mesh.flatten(axes, new_name))
    }

    /// This mesh with an axis split into several, as in [`DeviceMesh::unflatten`]. Collective.
    ///
    /// # Errors
    /// Those of [`DeviceMesh::unflatten`], and as [`flatten`](Self::flatten).
    pub fn unflatten<A: Into<StatedAxis>>(
        &self,
        axis: &str,
        into: impl IntoIterator<Item = A>,
    ) -> Result<Self, CommError> {
        let into: Vec<StatedAxis> = into.into_iter().map(Into::into).collect();
        self.derive(self.known.clone(), |mesh| mesh.unflatten(axis, &into))
    }

    /// The mesh with the axes of several slices of this mesh, as in [`DeviceMesh::concatenate`]. Collective.
    ///
    /// # Errors
    /// Those of [`DeviceMesh::concatenate`], [`CommError::NotSlices`] when `parts` are not slices of this mesh, and as
    /// [`flatten`](Self::flatten).
    pub fn concatenate(&self, parts: &[&Self]) -> Result<Self, CommError> {
        let mut meshes = Vec::new();
        let mut placed = HashSet::new();
        for mesh in &self.meshes {
            for &rank in mesh.ranks() {
                if placed.contains(&rank) {
                    continue;
                }
                let of_rank = parts.iter().map(|part| part.mesh_of(rank)).collect::<Result<Vec<_>, _>>()?;
                let joined = mesh.concatenate(&of_rank)?;
                let is_new = joined.ranks().iter().all(|&rank| placed.insert(rank));
                if !is_new || !joined.ranks().contains(&rank) {
                    return Err(CommError::NotSlices { rank, mesh: mesh.to_string() });
                }
                meshes.push(joined);
            }
        }
        self.create(meshes, self.known.clone())
    }

    /// The groups of `size` consecutive ranks along sp, on the axis [`ULYSSES_AXIS`]. They are groups of their own, so that each has
    /// its own statistics. Collective.
    ///
    /// # Errors
    /// As [`flatten`](Self::flatten), and when `size` does not divide sp.
    pub fn sp_blocks(&self, size: usize) -> Result<Self, CommError> {
        let blocks = |mesh: &DeviceMesh| {
            let axes = [Axis::new("blocks", -1), StatedAxis::from((ULYSSES_AXIS, size))];
            mesh.unflatten("sp", axes)?.slice(&[ULYSSES_AXIS])
        };
        let blocks = self.meshes.iter().map(blocks).collect::<Result<Vec<_>, _>>()?;
        self.create(blocks.concat(), Arc::new(self.known.of_single_ranks()))
    }

    fn derive(
        &self,
        known: Arc<KnownGroups>,
        reshape: impl Fn(&DeviceMesh) -> Result<DeviceMesh, MeshError>,
    ) -> Result<Self, CommError> {
        self.create(self.meshes.iter().map(reshape).collect::<Result<_, _>>()?, known)
    }

    fn create(&self, meshes: Vec<DeviceMesh>, known: Arc<KnownGroups>) -> Result<Self, CommError> {
        let derived = Self::over(meshes, known, self.device.clone());
        derived.known.compare(&derived.meshes, derived.mesh())?;
        derived.with_groups()
    }

    /// The mesh that contains a rank.
    fn mesh_of(&self, rank: usize) -> Result<DeviceMesh, MeshError> {
        let mesh = self.meshes.iter().find(|mesh| mesh.ranks().contains(&rank));
        mesh.cloned().ok_or_else(|| {
            let ranks: Vec<usize> = self.meshes.iter().flat_map(DeviceMesh::ranks).copied().collect();
            MeshError::NotAMember { rank, members: format!("{ranks:?}") }
        })
    }
}

impl AxisGroups for MeshGroups {
    fn mesh(&self) -> &DeviceMesh {
        self.mesh()
    }

    fn get_group(&self, axis: &str) -> Result<Arc<dyn ProcessGroup>, CommError> {
        self.get_group(axis)
    }

    fn ends(&self, axis: &str) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        let group = self.get_group(axis)?;
        let (rank, last) = (group.rank(), group.world_size() - 1);
        match last {
            0 | 1 => Ok(Some(group)),
            _ => group.split("ends", (rank == 0 || rank == last).then_some(0), rank),
        }
    }

    fn flatten(&self, axes: &[&str], new_name: &str) -> Result<Self, CommError> {
        self.flatten(axes, new_name)
    }

    /// They are groups of this mesh where the ranks are the same, except that partitions which span sp have groups of their own:
    /// gathers of parameters overlap with exchanges over sp.
    fn sharded(&self, shape: ShardShape) -> Result<Self, CommError> {
        let known = match shape.spans_sp {
            true => Arc::new(self.known.of_single_ranks()),
            false => self.known.clone(),
        };
        self.derive(known, |mesh| mesh.sharded(shape))
    }

    /// They are groups of their own even where the ranks are those of sp, so that each has its own statistics.
    fn ring(&self, ring_size: usize) -> Result<Self, CommError> {
        self.derive(Arc::new(self.known.of_single_ranks()), |mesh| mesh.ring(ring_size))
    }
}
