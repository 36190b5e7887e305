//! The process groups along the axes of a mesh.
//!
//! `known_groups.rs`: the groups that exist, by their ranks. `derive.rs`: slices and reshapes, which reuse them.

mod derive;
mod known_groups;
#[cfg(test)]
mod tests;

use super::{CommError, ProcessGroup};
use crate::mesh::{Axis, DeviceMesh, canonical_axis_name};
use candle_core::Device;
use known_groups::KnownGroups;
use std::sync::Arc;

/// One rank's groups along the axes of a [`DeviceMesh`].
///
/// Each ordered list of ranks has one group, however many axes and derived meshes use it: with
/// `dp=1,sp=4` the group along `sp` *is* the world. The group along an axis of size 1
/// contains only this rank and moves no data.
///
/// [`slice`](Self::slice) is local and creates nothing. [`flatten`](Self::flatten), [`unflatten`](Self::unflatten),
/// [`concatenate`](Self::concatenate) and the reshapes of [`AxisGroups`](super::AxisGroups) create the groups that do not exist yet, and are
/// collective: every rank of the world calls them at the same point in its order of operations, including ranks
/// outside the mesh.
///
/// # Examples
///
/// ```
/// use ulysses::comm::{CommError, LaunchOptions, MeshGroups, ProcessGroupExt, launch};
/// use ulysses::mesh::DeviceMesh;
///
/// let mesh = DeviceMesh::parse("2x2", None)?;
/// let neighbors = launch(4, &LaunchOptions::default(), |rank| -> Result<Vec<u32>, CommError> {
///     let groups = MeshGroups::new(&mesh, rank.group.clone())?;
///     groups.get_group("sp")?.all_gather_values(&[rank.rank as u32])
/// })?;
/// assert_eq!(neighbors, [[0, 1], [0, 1], [2, 3], [2, 3]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MeshGroups {
    /// The mesh or, of a slice, the slices of all ranks: all must know the lists of ranks that have groups.
    meshes: Vec<DeviceMesh>,
    /// Index of the mesh that contains this rank.
    own: Option<usize>,
    known: Arc<KnownGroups>,
    device: Device,
}

impl MeshGroups {
    /// Creates the groups of all axes, collectively: every rank of `world` calls this
    /// at the same point in its order of operations, including ranks outside the mesh.
    ///
    /// # Errors
    /// [`CommError::MeshMismatch`] when ranks pass different meshes,
    /// [`CommError::MeshOutsideGroup`] when the mesh has ranks that `world` lacks, and
    /// the errors of the collectives.
    pub fn new(mesh: &DeviceMesh, world: Arc<dyn ProcessGroup>) -> Result<Self, CommError> {
        let known = KnownGroups::of_world(world);
        known.check_mesh(mesh)?;
        known.find_or_split("mesh", vec![mesh.ranks().to_vec()])?;
        Self::over(vec![mesh.clone()], Arc::new(known), Device::Cpu).with_groups()
    }

    /// Wraps groups that exist, one per axis in the order of the mesh: torch's `DeviceMesh.from_group`. Creates none.
    /// `world` contains all ranks of the mesh; it may be one of the groups. Ranks outside the mesh pass no groups.
    /// Collective, as [`new`](Self::new).
    ///
    /// # Errors
    /// As [`new`](Self::new). [`CommError::GroupCount`] when there is not one group per axis, and
    /// [`CommError::WrongGroup`] when a group has other ranks than this rank's group along its axis.
    pub fn from_groups(
        mesh: &DeviceMesh,
        world: Arc<dyn ProcessGroup>,
        groups: &[Arc<dyn ProcessGroup>],
    ) -> Result<Self, CommError> {
        let known = KnownGroups::empty(world.clone());
        known.check_mesh(mesh)?;
        let rank = known.own_rank();
        let axes = if mesh.ranks().contains(&rank) { mesh.axes() } else { &[] };
        if groups.len() != axes.len() {
            let axes = axes.iter().map(|axis| axis.name.clone()).collect();
            return Err(CommError::GroupCount { rank, given: groups.len(), axes });
        }
        for (Axis { name: axis, .. }, group) in axes.iter().zip(groups) {
            let (expected, given) = (mesh.group_of(axis, rank)?, group.global_ranks().to_vec());
            if given != expected {
                return Err(CommError::WrongGroup { axis: axis.clone(), rank, given, expected });
            }
        }
        let lists = mesh.axes().iter().map(|axis| mesh.all_groups(&axis.name));
        known.add(lists.collect::<Result<Vec<_>, _>>()?.concat(), groups);
        known.add(vec![world.global_ranks().to_vec()], &[world]);
        Ok(Self::over(vec![mesh.clone()], Arc::new(known), Device::Cpu))
    }

    /// Meshes of the same shape, without a common rank.
    fn over(meshes: Vec<DeviceMesh>, known: Arc<KnownGroups>, device: Device) -> Self {
        let rank = known.own_rank();
        let own = meshes.iter().position(|mesh| mesh.ranks().contains(&rank));
        Self { meshes, own, known, device }
    }

    /// Creates the groups that do not exist yet.
    fn with_groups(self) -> Result<Self, CommError> {
        for axis in self.mesh().axis_names() {
            let lists = self.meshes.iter().map(|mesh| mesh.all_groups(axis));
            self.known.find_or_split(axis, lists.collect::<Result<Vec<_>, _>>()?.concat())?;
        }
        Ok(self)
    }

    /// Sets the device of this rank's tensors (torch's `init_device_mesh` also takes one); the default is
    /// the CPU.
    #[must_use]
    pub fn on(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// The device of this rank's tensors.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The mesh. Of a slice, the one that contains this rank; the first one on a rank outside the mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.meshes[self.own.unwrap_or(0)]
    }

    /// The group that the mesh was created on.
    pub fn world(&self) -> &Arc<dyn ProcessGroup> {
        self.known.world()
    }

    /// The group of all ranks of the mesh, in row-major order.
    ///
    /// # Errors
    /// [`CommError::NotMember`] on a rank outside the mesh. [`CommError::NoGroup`] for a slice or a reshaped mesh whose
    /// ranks have no group in this order.
    pub fn whole(&self) -> Result<Arc<dyn ProcessGroup>, CommError> {
        let mesh = self.own_mesh("all axes")?;
        let group = self.known.get(mesh.ranks());
        group.ok_or_else(|| CommError::NoGroup {
            mesh: mesh.to_string(),
            ranks: mesh.ranks().to_vec(),
            axes: mesh.axis_names().into_iter().map(str::to_owned).collect(),
        })
    }

    /// This rank's group along an axis. Aliases work as in
    /// [`DeviceMesh`]: `sequence_parallel` is `sp`.
    ///
    /// # Errors
    /// [`CommError::Mesh`] when the mesh has no such axis, [`CommError::NotMember`] on
    /// a rank outside the mesh.
    pub fn get_group(&self, axis: &str) -> Result<Arc<dyn ProcessGroup>, CommError> {
        self.mesh().axis_size(axis)?;
        let axis = canonical_axis_name(axis);
        let ranks = self.own_mesh(axis)?.group_of(axis, self.known.own_rank())?;
        self.known.get(&ranks).ok_or_else(|| CommError::NoGroup {
            mesh: self.mesh().to_string(),
            ranks,
            axes: vec![axis.to_owned()],
        })
    }

    /// This rank's group along every axis, in the order of the mesh.
    ///
    /// # Errors
    /// As [`get_group`](Self::get_group).
    pub fn get_all_groups(&self) -> Result<Vec<Arc<dyn ProcessGroup>>, CommError> {
        self.mesh().axis_names().iter().map(|axis| self.get_group(axis)).collect()
    }

    /// The mesh that contains this rank.
    fn own_mesh(&self, axis: &str) -> Result<&DeviceMesh, CommError> {
        self.own.map(|own| &self.meshes[own]).ok_or_else(|| CommError::NotMember {
            axis: axis.to_owned(),
            rank: self.known.own_rank(),
            members: self.meshes.iter().flat_map(DeviceMesh::ranks).copied().collect(),
        })
    }
}
