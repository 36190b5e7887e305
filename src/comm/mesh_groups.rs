//! The process groups along the axes of a mesh.

use super::{CommError, ProcessGroup, ProcessGroupExt};
use crate::mesh::{DeviceMesh, ShardShape, canonical_axis_name};
use candle_core::Device;
use std::sync::Arc;

/// One rank's groups along the axes of a [`DeviceMesh`].
///
/// Each ordered list of ranks has one group, however many axes use it: with
/// `dp=1,sp=4` the group along `sp` *is* the world. The group along an axis of size 1
/// contains only this rank and moves no data.
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
    mesh: DeviceMesh,
    world: Arc<dyn ProcessGroup>,
    whole: Member,
    /// By axis, in the mesh's order.
    axes: Vec<Member>,
    device: Device,
}

/// The group that this rank belongs to, if it is in the mesh.
type Member = Option<Arc<dyn ProcessGroup>>;

/// The ranks of all groups of an axis, and this rank's group.
type CreatedGroup = (Vec<Vec<usize>>, Member);

impl MeshGroups {
    /// Creates the groups of all axes, collectively: every rank of `world` calls this
    /// at the same point in its order of operations, including ranks outside the mesh.
    ///
    /// # Errors
    /// [`CommError::MeshMismatch`] when ranks pass different meshes,
    /// [`CommError::MeshOutsideGroup`] when the mesh has ranks that `world` lacks, and
    /// the errors of the collectives.
    pub fn new(mesh: &DeviceMesh, world: Arc<dyn ProcessGroup>) -> Result<Self, CommError> {
        compare_meshes(mesh, &*world)?;
        let members = world.global_ranks().to_vec();
        let missing: Vec<usize> =
            mesh.ranks().iter().copied().filter(|rank| !members.contains(rank)).collect();
        if !missing.is_empty() {
            return Err(CommError::MeshOutsideGroup { group: world.name().to_owned(), missing, members });
        }
        let mut known: Vec<CreatedGroup> = vec![(vec![members], Some(world.clone()))];
        let whole = find_or_split(&mut known, &*world, "mesh", vec![mesh.ranks().to_vec()])?;
        let axes = groups_of_axes(mesh, &*world, known)?;
        Ok(Self { mesh: mesh.clone(), world, whole, axes, device: Device::Cpu })
    }

    /// The groups of the same ranks along the axes of [`DeviceMesh::sharded`]: [`SHARD_AXIS`](super::SHARD_AXIS)
    /// and [`REPLICAS_AXIS`](super::REPLICAS_AXIS). They are groups of this mesh where the ranks are the same, except that
    /// partitions which span sp have groups of their own: gathers of parameters overlap with exchanges over sp. Collective,
    /// as [`new`](Self::new).
    ///
    /// # Errors
    /// As [`new`](Self::new), and when the mesh cannot be split into shards of that shape.
    pub fn sharded(&self, shape: ShardShape) -> Result<Self, CommError> {
        let (mesh, world) = (self.mesh.sharded(shape)?, self.world.clone());
        compare_meshes(&mesh, &*world)?;
        let axes = self.mesh.axis_names().iter().zip(&self.axes);
        let axes = axes.map(|(axis, group)| Ok((self.mesh.all_groups(axis)?, group.clone())));
        let mut known = axes.collect::<Result<Vec<CreatedGroup>, CommError>>()?;
        known.push((vec![self.mesh.ranks().to_vec()], self.whole.clone()));
        known.retain(|(division, _)| !shape.spans_sp || division.iter().all(|group| group.len() == 1));
        let axes = groups_of_axes(&mesh, &*world, known)?;
        Ok(Self { mesh, world, whole: self.whole.clone(), axes, device: self.device.clone() })
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

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The group that the mesh was created on.
    pub fn world(&self) -> &Arc<dyn ProcessGroup> {
        &self.world
    }

    /// The group of all ranks of the mesh, in row-major order.
    ///
    /// # Errors
    /// [`CommError::NotMember`] on a rank outside the mesh.
    pub fn whole(&self) -> Result<Arc<dyn ProcessGroup>, CommError> {
        self.member("all axes", &self.whole)
    }

    /// This rank's group along an axis. Aliases work as in
    /// [`DeviceMesh`]: `sequence_parallel` is `sp`.
    ///
    /// # Errors
    /// [`CommError::Mesh`] when the mesh has no such axis, [`CommError::NotMember`] on
    /// a rank outside the mesh.
    pub fn get_group(&self, axis: &str) -> Result<Arc<dyn ProcessGroup>, CommError> {
        self.mesh.axis_size(axis)?;
        let name = canonical_axis_name(axis);
        let group = self.mesh.axis_names().iter().zip(&self.axes).find(|(known, _)| *known == name);
        self.member(name, group.map_or(&None, |(_, group)| group))
    }

    fn member(&self, axis: &str, group: &Member) -> Result<Arc<dyn ProcessGroup>, CommError> {
        group.clone().ok_or_else(|| CommError::NotMember {
            axis: axis.to_owned(),
            rank: self.world.global_ranks()[self.world.rank()],
            members: self.mesh.ranks().to_vec(),
        })
    }
}

/// Returns this rank's groups of all axes, those in `known` where they are equal.
fn groups_of_axes(
    mesh: &DeviceMesh,
    world: &dyn ProcessGroup,
    mut known: Vec<CreatedGroup>,
) -> Result<Vec<Member>, CommError> {
    let split = |axis: &String| find_or_split(&mut known, world, axis, mesh.all_groups(axis)?);
    mesh.axis_names().iter().map(split).collect()
}

/// Returns this rank's group of an axis. All ranks know the same groups,
/// so either all ranks split or none does.
fn find_or_split(
    known: &mut Vec<CreatedGroup>,
    world: &dyn ProcessGroup,
    name: &str,
    division: Vec<Vec<usize>>,
) -> Result<Member, CommError> {
    if let Some((_, group)) = known.iter().find(|(other, _)| *other == division) {
        return Ok(group.clone());
    }
    let own_rank = world.global_ranks()[world.rank()];
    let place = |(color, group): (usize, &Vec<usize>)| {
        group.iter().position(|&rank| rank == own_rank).map(|key| (color, key))
    };
    let place = division.iter().enumerate().find_map(place);
    let group = world.split(name, place.map(|(color, _)| color), place.map_or(0, |(_, key)| key))?;
    known.push((division, group.clone()));
    Ok(group)
}

/// Ranks with different meshes would wait for each other in different groups, so
/// the meshes are compared before any group is created.
fn compare_meshes(mesh: &DeviceMesh, world: &dyn ProcessGroup) -> Result<(), CommError> {
    let fingerprints = world.all_gather_values(&[mesh.fingerprint().cast_signed()])?;
    let votes = |of: i64| fingerprints.iter().filter(|&&fingerprint| fingerprint == of).count();
    // Ties go to the lowest rank.
    let majority =
        fingerprints.iter().copied().reduce(|best, next| if votes(next) > votes(best) { next } else { best });
    let differs = |&(fingerprint, _): &(&i64, &usize)| Some(*fingerprint) != majority;
    let ranks = fingerprints.iter().zip(world.global_ranks());
    let differing: Vec<usize> = ranks.filter(differs).map(|(_, &rank)| rank).collect();
    if differing.is_empty() {
        return Ok(());
    }
    let rank = world.global_ranks()[world.rank()];
    let mesh = format!("{:?} of shape {:?} over ranks {:?}", mesh.axis_names(), mesh.shape(), mesh.ranks());
    Err(CommError::MeshMismatch { differing, rank, mesh })
}

#[cfg(test)]
mod tests {
    use super::super::{CollectiveOp, LaunchOptions, ReduceOp, launch};
    use super::*;

    fn on_ranks<T: Send>(
        world_size: usize,
        run: impl Fn(usize, Arc<dyn ProcessGroup>) -> Result<T, CommError> + Sync,
    ) -> Vec<T> {
        launch(world_size, &LaunchOptions::default(), |context| run(context.rank, context.group)).unwrap()
    }

    #[test]
    fn groups_follow_the_axes_and_reduce_over_their_members_only() {
        let sums = on_ranks(4, |rank, world| {
            let groups = MeshGroups::new(&DeviceMesh::dp_sp(2, 2).unwrap(), world)?;
            let value = [10_f32.powi(rank as i32)];
            let dp = groups.get_group("dp")?;
            let sp = groups.get_group("sequence_parallel")?;
            assert_eq!((dp.name(), sp.name()), ("dp", "sp"));
            assert_eq!(dp.global_ranks(), [rank % 2, rank % 2 + 2]);
            Ok((
                dp.all_reduce_values(&value, ReduceOp::Sum)?[0],
                sp.all_reduce_values(&value, ReduceOp::Sum)?[0],
            ))
        });
        assert_eq!(sums, [(101.0, 11.0), (1010.0, 11.0), (101.0, 1100.0), (1010.0, 1100.0)]);
    }

    #[test]
    fn the_same_ordered_ranks_share_one_group_and_size_one_axes_move_nothing() {
        on_ranks(3, |_, world| {
            let mesh = DeviceMesh::new(&[("pp", 1), ("dp", 1), ("sp", 3)], None).unwrap();
            let groups = MeshGroups::new(&mesh, world.clone())?;
            assert!(Arc::ptr_eq(&groups.get_group("sp")?, &world));
            assert!(Arc::ptr_eq(&groups.whole()?, &world));
            let dp = groups.get_group("dp")?;
            assert!(Arc::ptr_eq(&dp, &groups.get_group("pp")?));
            assert_eq!(dp.world_size(), 1);
            assert_eq!(dp.all_reduce_values(&[7_u32], ReduceOp::Sum)?, [7]);
            assert_eq!(dp.stats().ops.len(), 0);
            Ok(())
        });
    }

    #[test]
    fn another_order_of_the_same_ranks_is_another_group() {
        on_ranks(3, |rank, world| {
            let mesh = DeviceMesh::with_ranks(&[("sp", 3)], vec![2, 0, 1]).unwrap();
            let groups = MeshGroups::new(&mesh, world.clone())?;
            let sp = groups.get_group("sp")?;
            assert!(!Arc::ptr_eq(&sp, &world));
            assert_eq!(sp.rank(), [1, 2, 0][rank]);
            assert_eq!(sp.all_gather_values(&[rank as u32])?, [2, 0, 1]);
            Ok(())
        });
    }

    #[test]
    fn ranks_outside_the_mesh_take_part_in_its_making_but_have_no_group() {
        on_ranks(3, |rank, world| {
            let mesh = DeviceMesh::with_ranks(&[("sp", 2)], vec![0, 2]).unwrap();
            let groups = MeshGroups::new(&mesh, world)?;
            match groups.get_group("sp") {
                Ok(group) => assert_eq!((rank != 1, group.global_ranks()), (true, &[0, 2][..])),
                Err(error) => {
                    assert_eq!(
                        error,
                        CommError::NotMember { axis: "sp".into(), rank: 1, members: vec![0, 2] }
                    );
                }
            }
            assert_eq!(groups.whole().is_ok(), rank != 1);
            Ok(())
        });
    }

    #[test]
    fn unknown_axes_are_answered_with_the_valid_ones() {
        on_ranks(1, |_, world| {
            let groups = MeshGroups::new(&DeviceMesh::dp_sp(1, 1).unwrap(), world)?;
            let message = groups.get_group("tp").unwrap_err().to_string();
            assert!(message.contains("tp") && message.contains("dp") && message.contains("sp"), "{message}");
            Ok(())
        });
    }

    #[test]
    fn ranks_with_another_mesh_are_named_before_any_group_is_made() {
        let errors = on_ranks(4, |rank, world| {
            let (dp, sp) = if rank == 2 { (4, 1) } else { (2, 2) };
            let error = MeshGroups::new(&DeviceMesh::dp_sp(dp, sp).unwrap(), world.clone()).unwrap_err();
            assert_eq!(world.stats().get(CollectiveOp::Split).calls, 0);
            Ok(error)
        });
        for error in errors {
            assert!(
                matches!(&error, CommError::MeshMismatch { differing, .. } if *differing == [2]),
                "{error}"
            );
        }
    }

    #[test]
    fn a_mesh_larger_than_the_world_is_refused() {
        on_ranks(2, |_, world| {
            let error = MeshGroups::new(&DeviceMesh::dp_sp(2, 2).unwrap(), world).unwrap_err();
            assert!(
                matches!(&error, CommError::MeshOutsideGroup { missing, .. } if *missing == [2, 3]),
                "{error}"
            );
            Ok(())
        });
    }

    #[test]
    fn ranks_with_different_shard_shapes_are_named() {
        let mesh = DeviceMesh::dp_sp(4, 1).unwrap();
        let refused = launch(4, &LaunchOptions::default(), |rank| {
            let groups = MeshGroups::new(&mesh, rank.group.clone())?;
            let dp_size = if rank.rank == 2 { 2 } else { 4 };
            groups.sharded(ShardShape { dp_size, spans_sp: true }).map(drop)
        });
        let message = format!("{:#}", anyhow::Error::from(refused.unwrap_err()));
        assert!(message.contains("[2]"), "{message}");
    }
}
