//! Groups of meshes, on ranks that are threads.

use super::super::{AxisGroups, CollectiveOp, LaunchOptions, ProcessGroupExt, ReduceOp, launch};
use super::*;
use crate::mesh::ShardShape;

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
        Ok((dp.all_reduce_values(&value, ReduceOp::Sum)?[0], sp.all_reduce_values(&value, ReduceOp::Sum)?[0]))
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
                assert_eq!(error, CommError::NotMember { axis: "sp".into(), rank: 1, members: vec![0, 2] });
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
        assert!(matches!(&error, CommError::MeshMismatch { differing, .. } if *differing == [2]), "{error}");
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

/// Splits of the world so far: each creates at most one communicator of this rank.
fn splits(world: &Arc<dyn ProcessGroup>) -> u64 {
    world.stats().get(CollectiveOp::Split).calls
}

fn same(one: &Arc<dyn ProcessGroup>, other: &Arc<dyn ProcessGroup>) -> bool {
    Arc::ptr_eq(one, other)
}

#[test]
fn slices_create_nothing_and_have_the_groups_of_the_mesh() {
    on_ranks(8, |rank, world| {
        let mesh = DeviceMesh::new(&[("replicate", 2), ("shard", 2), ("tp", 2)], None).unwrap();
        let groups = MeshGroups::new(&mesh, world.clone())?;
        let (created, before) = (splits(&world), world.stats());
        assert_eq!(created, 3, "one split per axis: the mesh is the world");
        let hsdp = groups.slice(&["replicate", "shard"])?;
        assert_eq!(*hsdp.mesh(), mesh.slice_for(&["replicate", "shard"], rank).unwrap());
        let of_axis = hsdp.slice(&["shard"])?.get_group("shard")?;
        assert!(same(&of_axis, &groups.get_group("shard")?));
        let all = hsdp.get_all_groups()?;
        assert!(same(&all[0], &groups.get_group("replicate")?) && same(&all[1], &of_axis));
        assert_eq!((all.len(), groups.get_all_groups()?.len()), (2, 3));
        assert!(same(&groups.slice(&["tp"])?.whole()?, &groups.get_group("tp")?));
        let message = hsdp.whole().unwrap_err().to_string();
        assert!(message.contains("replicate=2,shard=2") && message.contains("flatten"), "{message}");
        assert!(matches!(hsdp.get_group("tp"), Err(CommError::Mesh(_))), "it has no such axis");
        assert!(matches!(groups.slice(&["shard", "replicate"]), Err(CommError::Mesh(_))), "out of order");
        assert_eq!(world.stats(), before, "slices do not communicate");
        Ok(())
    });
}

#[test]
fn reshapes_create_a_communicator_only_for_lists_of_ranks_without_one() {
    on_ranks(8, |rank, world| {
        let mesh = DeviceMesh::new(&[("dp", 2), ("cp", 2), ("tp", 2)], None).unwrap();
        let groups = MeshGroups::new(&mesh, world.clone())?;
        let created = splits(&world);
        let flat = groups.flatten(&["dp", "cp"], "data")?;
        assert_eq!(splits(&world), created + 1, "data is new, tp is not");
        assert!(same(&flat.get_group("tp")?, &groups.get_group("tp")?));
        let data = flat.get_group("data")?;
        assert_eq!(data.global_ranks(), [rank % 2, rank % 2 + 2, rank % 2 + 4, rank % 2 + 6]);
        assert_eq!(data.all_reduce_values(&[1 << rank], ReduceOp::Sum)?, [0b0101_0101_i64 << (rank % 2)]);
        // Torch's form, and again: the list of ranks is known by now.
        let of_slice = groups.slice(&["dp", "cp"])?.flatten(&["dp", "cp"], "again")?;
        assert!(same(&of_slice.get_group("again")?, &data) && same(&of_slice.whole()?, &data));
        assert!(same(&groups.flatten(&["dp", "cp", "tp"], "all")?.get_group("all")?, &world));
        let back = flat.unflatten("data", &[("dp", 2), ("cp", -1)])?;
        assert_eq!(*back.mesh(), mesh);
        assert!(back.get_all_groups()?.iter().zip(groups.get_all_groups()?).all(|(a, b)| same(a, &b)));
        let (dp, tp) = (groups.slice(&["dp"])?, groups.slice(&["tp"])?);
        let joined = groups.concatenate(&[&tp, &dp])?;
        assert_eq!(joined.mesh().axis_names(), ["tp", "dp"]);
        assert!(same(&joined.get_group("dp")?, &groups.get_group("dp")?));
        let with_data = groups.concatenate(&[&of_slice, &tp])?;
        assert!(same(&with_data.get_group("again")?, &data));
        assert_eq!(splits(&world), created + 1, "everything else existed");
        Ok(())
    });
}

#[test]
fn some_lists_of_an_axis_may_be_known_and_others_new() {
    on_ranks(4, |rank, world| {
        let first = DeviceMesh::with_ranks(&[("sp", 2)], vec![0, 1]).unwrap();
        let known = KnownGroups::of_world(world.clone());
        known.find_or_split("first", vec![first.ranks().to_vec()])?;
        let before = known.get(&[0, 1]);
        known.find_or_split("sp", vec![vec![2, 3], vec![0, 1]])?;
        assert_eq!(splits(&world), 2);
        let own = known.get(if rank < 2 { &[0, 1] } else { &[2, 3] }).unwrap();
        assert!(before.is_none_or(|before| same(&before, &own)), "not made twice");
        assert_eq!(own.all_gather_values(&[rank as u32])?, if rank < 2 { [0, 1] } else { [2, 3] });
        Ok(())
    });
}

#[test]
fn groups_that_exist_are_wrapped_and_nothing_is_created() {
    on_ranks(5, |rank, world| {
        // Rank 4 is outside.
        let mesh = DeviceMesh::dp_sp(2, 2).unwrap();
        let is_inside = rank < 4;
        let dp = world.split("by hand: dp", is_inside.then_some(rank % 2), rank)?;
        let sp = world.split("by hand: sp", is_inside.then_some(rank / 2), rank)?;
        let given: Vec<_> = dp.into_iter().chain(sp).collect();
        let created = splits(&world);
        let groups = MeshGroups::from_groups(&mesh, world.clone(), &given)?;
        if is_inside {
            assert!(groups.get_all_groups()?.iter().zip(&given).all(|(group, given)| same(group, given)));
            assert!(matches!(groups.whole(), Err(CommError::NoGroup { .. })));
        } else {
            assert!(matches!(groups.get_group("sp"), Err(CommError::NotMember { rank: 4, .. })));
        }
        groups.slice(&["sp"])?;
        assert_eq!(splits(&world), created);
        let all = groups.flatten(&["dp", "sp"], "all")?;
        assert_eq!(splits(&world), created + 1);
        assert_eq!(all.whole().is_ok(), is_inside);
        Ok(())
    });
    // One group, in which the mesh is the whole world.
    on_ranks(2, |_, world| {
        let mesh = DeviceMesh::new(&[("sp", 2)], None).unwrap();
        let groups = MeshGroups::from_groups(&mesh, world.clone(), std::slice::from_ref(&world))?;
        assert!(same(&groups.whole()?, &world) && splits(&world) == 0);
        Ok(())
    });
}

#[test]
fn groups_that_do_not_fit_the_mesh_are_named_with_axis_and_ranks() {
    on_ranks(4, |rank, world| {
        let mesh = DeviceMesh::dp_sp(2, 2).unwrap();
        let groups = MeshGroups::new(&mesh, world.clone())?.get_all_groups()?;
        let refused = |given: &[Arc<dyn ProcessGroup>]| {
            MeshGroups::from_groups(&mesh, world.clone(), given).unwrap_err().to_string()
        };
        let swapped = refused(&[groups[1].clone(), groups[0].clone()]);
        let (dp, sp) = (groups[0].global_ranks(), groups[1].global_ranks());
        let expected =
            format!("axis \"dp\" has ranks {sp:?}, but rank {rank}'s group along it has ranks {dp:?}");
        assert!(swapped.contains(&expected), "{swapped}");
        let missing = refused(&groups[..1]);
        assert!(missing.contains("gives 1 group(s) for its axes [dp, sp]"), "{missing}");
        Ok(())
    });
}

#[test]
fn parts_of_another_mesh_cannot_be_concatenated() {
    on_ranks(4, |_, world| {
        let groups = MeshGroups::new(&DeviceMesh::dp_sp(2, 2).unwrap(), world.clone())?;
        let other = DeviceMesh::with_ranks(&[("a", 2), ("b", 2)], vec![0, 3, 1, 2]).unwrap();
        let other = MeshGroups::new(&other, world)?;
        let refused = groups.concatenate(&[&other.slice(&["a"])?, &groups.slice(&["sp"])?]).unwrap_err();
        assert!(matches!(refused, CommError::NotSlices { .. } | CommError::Mesh(_)), "{refused}");
        let twice = groups.concatenate(&[&groups.slice(&["sp"])?, &groups]).unwrap_err();
        assert!(twice.to_string().contains("both run along axis `sp`"), "{twice}");
        Ok(())
    });
}

#[test]
fn ranks_that_derive_different_meshes_are_named() {
    let mesh = DeviceMesh::dp_sp(2, 2).unwrap();
    let refused = launch(4, &LaunchOptions::default(), |rank| {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        groups.flatten(&["dp", "sp"], if rank.rank == 1 { "world" } else { "all" }).map(drop)
    });
    let message = format!("{:#}", anyhow::Error::from(refused.unwrap_err()));
    assert!(message.contains("[1]") && message.contains("different mesh"), "{message}");
}
