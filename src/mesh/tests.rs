use super::*;

fn dp_cp_tp() -> DeviceMesh {
    DeviceMesh::new(&[("dp", 2), ("cp", 2), ("tp", 2)], None).unwrap()
}

fn rank_lists(meshes: &[DeviceMesh]) -> Vec<&[usize]> {
    meshes.iter().map(DeviceMesh::ranks).collect()
}

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

#[test]
fn two_by_two_groups_are_columns_and_rows() {
    let mesh = DeviceMesh::dp_sp(2, 2).unwrap();
    assert_eq!(mesh.all_groups("dp").unwrap(), [[0, 2], [1, 3]]);
    assert_eq!(mesh.all_groups("sp").unwrap(), [[0, 1], [2, 3]]);
}

#[test]
fn two_by_four_rows_are_rank_div_4_and_columns_rank_mod_4() {
    let mesh = DeviceMesh::dp_sp(2, 4).unwrap();
    assert_eq!((mesh.shape(), mesh.world_size()), (vec![2, 4], 8));
    for rank in 0..8 {
        assert_eq!(mesh.coordinate(rank).unwrap(), [rank / 4, rank % 4]);
        assert_eq!(mesh.coordinate_on("dp", rank).unwrap(), rank / 4);
        assert_eq!(mesh.coordinate_on("sp", rank).unwrap(), rank % 4);
        assert_eq!(mesh.group_of("dp", rank).unwrap(), [rank % 4, rank % 4 + 4]);
    }
}

#[test]
fn slices_over_two_of_three_axes_are_all_submeshes() {
    let mesh = DeviceMesh::new(&[("replicate", 2), ("shard", 2), ("tp", 2)], None).unwrap();
    let slices = mesh.slice(&["replicate", "shard"]).unwrap();
    assert_eq!(rank_lists(&slices), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    assert!(slices.iter().all(|slice| slice.shape() == [2, 2]));
    assert_eq!(slices[1].rank_at(&[0, 1]).unwrap(), 3);
    assert_eq!(slices[1].rank_at(&[1, 0]).unwrap(), 5);

    let mesh = DeviceMesh::new(&[("dp", 2), ("pp", 2), ("cp", 2)], None).unwrap();
    let slices = mesh.slice(&["dp", "cp"]).unwrap();
    assert_eq!(rank_lists(&slices), [[0, 1, 4, 5], [2, 3, 6, 7]]);
    assert_eq!(slices[0].axis_names(), ["dp", "cp"]);
    for rank in 0..8 {
        let slice = mesh.slice_for(&["dp", "cp"], rank).unwrap();
        assert_eq!(slice, slices[rank / 2 % 2]);
        assert!(slice.ranks().contains(&rank));
    }
}

#[test]
fn slicing_in_another_order_names_the_valid_one() {
    let mesh = dp_cp_tp();
    for requested in [["tp", "dp"], ["dp", "dp"]] {
        let valid = if requested[0] == "tp" { vec!["dp", "tp"] } else { vec!["dp"] };
        let expected = MeshError::AxisOrder { requested: strings(&requested), valid: strings(&valid) };
        assert_eq!(mesh.slice(&requested), Err(expected.clone()));
        assert_eq!(mesh.slice_for(&requested, 0), Err(expected.clone()));
        assert_eq!(mesh.flatten(&requested, "all"), Err(expected));
    }
    assert_eq!(mesh.slice(&[]), Err(MeshError::NoAxes));
    let unknown = MeshError::UnknownAxis { axis: "pp".into(), axes: strings(&["dp", "cp", "tp"]) };
    assert_eq!(mesh.slice(&["dp", "pp"]), Err(unknown.clone()));
    assert_eq!(mesh.all_groups("pp"), Err(unknown.clone()));
    assert_eq!(mesh.axis_size("pp"), Err(unknown.clone()));
    assert_eq!(mesh.coordinate_on("pp", 0), Err(unknown.clone()));
    assert_eq!(mesh.unflatten("pp", &[("a", 2)]), Err(unknown));
}

#[test]
fn flattening_skips_the_axis_between() {
    let mesh = dp_cp_tp();
    let flat = mesh.flatten(&["dp", "tp"], "dp_tp").unwrap();
    assert_eq!(flat.axis_names(), ["dp_tp", "cp"]);
    assert_eq!(flat.all_groups("dp_tp").unwrap(), [[0, 1, 4, 5], [2, 3, 6, 7]]);
    assert_eq!(flat.all_groups("cp").unwrap(), [[0, 2], [1, 3], [4, 6], [5, 7]]);
    // PyTorch's form: one rank's submesh, flattened.
    let of_rank_6 = mesh.slice_for(&["dp", "tp"], 6).unwrap().flatten(&["dp", "tp"], "dp_tp").unwrap();
    assert_eq!((of_rank_6.shape(), of_rank_6.ranks()), (vec![4], &[2, 3, 6, 7][..]));
}

#[test]
fn unflatten_inverts_flatten_of_neighbours() {
    let mesh = DeviceMesh::new(&[("pp", 2), ("dp", 3), ("sp", 4)], None).unwrap();
    let flat = mesh.flatten(&["dp", "sp"], "world").unwrap();
    assert_eq!((flat.shape(), flat.ranks()), (vec![2, 12], mesh.ranks()));
    assert_eq!(flat.unflatten("world", &[("dp", 3), ("sp", 4)]).unwrap(), mesh);
    assert_eq!(flat.unflatten("world", &[("dp", -1), ("sp", 4)]).unwrap(), mesh);
    assert_eq!(mesh.flatten(&["dp"], "data").unwrap().axis_names(), ["pp", "data", "sp"]);
}

#[test]
fn flatten_and_unflatten_reject_taken_names_and_wrong_sizes() {
    let mesh = dp_cp_tp();
    let taken = Err(MeshError::DuplicateName { name: "cp".into() });
    assert_eq!(mesh.flatten(&["dp", "tp"], "cp"), taken);
    assert_eq!(mesh.unflatten("dp", &[("cp", 2), ("x", 1)]), taken);
    assert_eq!(mesh.flatten(&["dp", "tp"], ""), Err(MeshError::InvalidName { name: String::new() }));
    assert_eq!(
        mesh.unflatten("dp", &[("a", 2), ("b", 2)]),
        Err(MeshError::UnflattenSize { axis: "dp".into(), size: 2, into: "a=2,b=2".into(), product: 4 })
    );
    assert_eq!(
        mesh.unflatten("dp", &[("a", 3), ("b", -1)]),
        Err(MeshError::CannotInfer { axis: "b".into(), known: 3, total: 2 })
    );
    assert_eq!(mesh.unflatten("dp", [] as [StatedAxis; 0]), Err(MeshError::NoAxes));
}

#[test]
fn concatenating_slices_of_a_rank_gives_the_slice_over_both_axes() {
    let mesh = dp_cp_tp();
    for rank in 0..8 {
        let dp = mesh.slice_for(&["dp"], rank).unwrap();
        let tp = mesh.slice_for(&["tp"], rank).unwrap();
        let joined = mesh.concatenate(&[dp.clone(), tp.clone()]).unwrap();
        assert_eq!(joined, mesh.slice_for(&["dp", "tp"], rank).unwrap());
        let other_order = mesh.concatenate(&[tp, dp]).unwrap();
        assert_eq!(other_order.axis_names(), ["tp", "dp"]);
        assert_eq!(other_order.all_groups("dp").unwrap(), joined.all_groups("dp").unwrap());
    }
    let dp_cp = mesh.slice_for(&["dp", "cp"], 5).unwrap().flatten(&["dp", "cp"], "data").unwrap();
    let joined = mesh.concatenate(&[dp_cp, mesh.slice_for(&["tp"], 5).unwrap()]).unwrap();
    assert_eq!(joined, mesh.flatten(&["dp", "cp"], "data").unwrap());
}

#[test]
fn concatenating_parts_that_do_not_fit_is_an_error() {
    let mesh = dp_cp_tp();
    let dp = mesh.slice_for(&["dp"], 0).unwrap();
    let dp_cp = mesh.slice_for(&["dp", "cp"], 0).unwrap();
    let tp_of_others = mesh.slice_for(&["tp"], 2).unwrap();
    assert_eq!(mesh.concatenate(&[]), Err(MeshError::NoAxes));
    let no_common = mesh.concatenate(&[dp.clone(), tp_of_others]);
    assert!(matches!(no_common, Err(MeshError::NoCommonRank { .. })), "{no_common:?}");
    let overlap = mesh.concatenate(&[dp.clone(), dp_cp]);
    assert!(matches!(&overlap, Err(MeshError::OverlappingAxes { axis, .. }) if axis == "dp"), "{overlap:?}");
    let stranger = DeviceMesh::with_ranks(&[("x", 2)], vec![0, 99]).unwrap();
    let outside = mesh.concatenate(&[dp.clone(), stranger]);
    assert!(matches!(outside, Err(MeshError::NotAMember { rank: 99, .. })), "{outside:?}");
    let same_name = mesh.slice_for(&["cp"], 0).unwrap().flatten(&["cp"], "dp").unwrap();
    assert_eq!(mesh.concatenate(&[dp, same_name]), Err(MeshError::DuplicateName { name: "dp".into() }));
}

#[test]
fn a_custom_rank_order_is_used() {
    let mesh = DeviceMesh::with_ranks(&[("dp", 2), ("sp", -1)], vec![7, 5, 1, 3]).unwrap();
    assert_eq!(mesh.all_groups("sp").unwrap(), [[7, 5], [1, 3]]);
    assert_eq!(mesh.all_groups("dp").unwrap(), [[7, 1], [5, 3]]);
    assert_eq!(mesh.coordinate(1).unwrap(), [1, 0]);
    assert_eq!(mesh.to_string(), "dp=2,sp=2 over ranks [7, 5, 1, 3]");
    let expected = MeshError::NotAMember { rank: 0, members: "[7, 5, 1, 3]".into() };
    assert_eq!(mesh.group_of("sp", 0), Err(expected));
}

#[test]
fn coordinates_invert_and_groups_partition_the_world() {
    let shapes: [&[i64]; 7] = [&[1], &[5], &[1, 1], &[3, 4], &[4, 1, 3], &[2, 3, 2, 2], &[2, 1, 3, 1, 2]];
    for shape in shapes {
        let names: Vec<String> = (0..shape.len()).map(|axis| format!("axis{axis}")).collect();
        let axes: Vec<_> = names.iter().map(String::as_str).zip(shape.iter().copied()).collect();
        let world_size = shape.iter().product::<i64>() as usize;
        // A rank order in which no rank keeps its place tells positions from ranks.
        let shifted: Vec<usize> = (0..world_size).map(|position| (position + 1) % world_size + 10).collect();
        for mesh in
            [DeviceMesh::new(&axes, None).unwrap(), DeviceMesh::with_ranks(&axes, shifted.clone()).unwrap()]
        {
            for (position, &rank) in mesh.ranks().iter().enumerate() {
                let coordinate = mesh.coordinate(rank).unwrap();
                assert_eq!(mesh.rank_at(&coordinate).unwrap(), rank);
                let row_major = coordinate.iter().zip(mesh.shape()).fold(0, |at, (c, size)| at * size + c);
                assert_eq!(row_major, position);
            }
            for (axis, name) in names.iter().enumerate() {
                let groups = mesh.all_groups(name).unwrap();
                let mut members = groups.concat();
                members.sort_unstable();
                let mut ranks = mesh.ranks().to_vec();
                ranks.sort_unstable();
                assert_eq!(members, ranks);
                for group in &groups {
                    for (index, &rank) in group.iter().enumerate() {
                        assert_eq!(mesh.coordinate(rank).unwrap()[axis], index);
                        assert_eq!(&mesh.group_of(name, rank).unwrap(), group);
                    }
                }
            }
        }
    }
}

#[test]
fn one_size_is_inferred_from_the_world_size() {
    let mesh = DeviceMesh::new(&[("dp", -1), ("sp", 4)], Some(12)).unwrap();
    assert_eq!(mesh, DeviceMesh::dp_sp(3, 4).unwrap());
    let infer = |axes: &[(&str, i64)], world_size| DeviceMesh::new(axes, world_size).unwrap_err();
    let axis = || "dp".to_owned();
    assert_eq!(
        infer(&[("dp", -1), ("sp", 4)], Some(10)),
        MeshError::CannotInfer { axis: axis(), known: 4, total: 10 }
    );
    assert_eq!(infer(&[("dp", -1)], Some(0)), MeshError::CannotInfer { axis: axis(), known: 1, total: 0 });
    assert_eq!(infer(&[("dp", -1), ("sp", 4)], None), MeshError::InferWithoutWorldSize { axis: axis() });
    assert_eq!(
        infer(&[("dp", -1), ("sp", -1)], Some(4)),
        MeshError::SeveralInferred { axes: strings(&["dp", "sp"]) }
    );
}

#[test]
fn impossible_meshes_are_errors() {
    let fail = |axes: &[(&str, i64)]| DeviceMesh::new(axes, None).unwrap_err();
    assert_eq!(fail(&[]), MeshError::NoAxes);
    for name in ["", "a b", "a=b", "a,b"] {
        assert_eq!(fail(&[(name, 2)]), MeshError::InvalidName { name: name.into() });
    }
    assert_eq!(fail(&[("dp", 2), ("dp", 2)]), MeshError::DuplicateName { name: "dp".into() });
    assert_eq!(fail(&[("dp", 2), ("data_parallel", 2)]), MeshError::DuplicateName { name: "dp".into() });
    for size in [0, -2, i64::MIN] {
        assert_eq!(fail(&[("dp", 2), ("sp", size)]), MeshError::InvalidSize { axis: "sp".into(), size });
    }
    let limit = MAX_RANKS;
    assert_eq!(fail(&[("a", 1 << 21)]), MeshError::TooManyRanks { mesh: "a=2097152".into(), limit });
    assert!(matches!(fail(&[("a", i64::MAX), ("b", i64::MAX)]), MeshError::TooManyRanks { .. }));
    assert!(matches!(DeviceMesh::dp_sp(usize::MAX, 1), Err(MeshError::TooManyRanks { .. })));
    assert!(matches!(DeviceMesh::dp_sp(2, 0), Err(MeshError::InvalidSize { size: 0, .. })));
    let mismatch =
        |world_size| MeshError::WorldSizeMismatch { mesh: "dp=2,sp=2".into(), product: 4, world_size };
    assert_eq!(DeviceMesh::new(&[("dp", 2), ("sp", 2)], Some(8)), Err(mismatch(8)));
    assert_eq!(DeviceMesh::with_ranks(&[("dp", 2), ("sp", 2)], vec![0, 1, 2]), Err(mismatch(3)));
    let repeated = DeviceMesh::with_ranks(&[("dp", 2), ("sp", 2)], vec![0, 1, 2, 1]);
    assert_eq!(repeated, Err(MeshError::DuplicateRank { rank: 1 }));
}

#[test]
fn ranks_and_coordinates_outside_the_mesh_are_errors() {
    let mesh = DeviceMesh::dp_sp(2, 4).unwrap();
    let stranger = MeshError::NotAMember { rank: 8, members: "0..=7".into() };
    assert_eq!(mesh.coordinate(8), Err(stranger.clone()));
    assert_eq!(mesh.group_of("sp", 8), Err(stranger.clone()));
    assert_eq!(mesh.slice_for(&["sp"], 8), Err(stranger));
    let axes = strings(&["dp", "sp"]);
    assert_eq!(mesh.rank_at(&[1]), Err(MeshError::CoordinateLength { given: 1, axes }));
    let outside = MeshError::CoordinateOutOfRange { axis: "sp".into(), coordinate: 4, size: 4 };
    assert_eq!(mesh.rank_at(&[0, 4]), Err(outside));
}

#[test]
fn deepspeed_axis_names_are_aliases_everywhere() {
    let mesh = DeviceMesh::new(&[("data_parallel", 2), ("sequence_parallel", 2)], None).unwrap();
    assert_eq!(mesh, DeviceMesh::dp_sp(2, 2).unwrap());
    assert_eq!(mesh.axis_size("sequence_parallel"), Ok(2));
    assert_eq!(mesh.all_groups("data_parallel"), mesh.all_groups("dp"));
    assert_eq!(mesh.slice(&["data_parallel"]), mesh.slice(&["dp"]));
    assert!(mesh.has_axis("sequence_parallel") && !mesh.has_axis("tp"));
    let renamed = mesh.flatten(&["dp", "sp"], "data_parallel").unwrap();
    assert_eq!(renamed.axis_names(), ["dp"]);
}

#[test]
fn both_notations_are_read_and_display_is_read_back() {
    assert_eq!("2x4".parse::<DeviceMesh>(), DeviceMesh::dp_sp(2, 4));
    assert_eq!(DeviceMesh::parse("sp=4, dp=2", None).unwrap().axis_names(), ["sp", "dp"]);
    assert_eq!(DeviceMesh::parse("-1x4", Some(8)), DeviceMesh::dp_sp(2, 4));
    assert_eq!(DeviceMesh::parse("data_parallel=2,sp=-1", Some(8)), DeviceMesh::dp_sp(2, 4));
    let mesh = DeviceMesh::parse("pp=3,dp=2,sp=4", None).unwrap();
    assert_eq!(mesh.to_string(), "pp=3,dp=2,sp=4");
    assert_eq!(mesh.to_string().parse(), Ok(mesh.clone()));
    assert_eq!(DeviceMesh::parse_with_names("3x2x4", &["pp", "dp", "sp"], None), Ok(mesh));
}

#[test]
fn unreadable_meshes_say_what_is_wrong() {
    for (text, wrong) in [
        ("", "`` is not a size"),
        ("2x", "`` is not a size"),
        ("8", "1 sizes for the axes"),
        ("3x2x2x2", "4 sizes for the axes dp, sp, tp: name them, such as pp=3,dp=2,sp=2,tp=2"),
        ("dp=2,sp", "`sp` has no `=`"),
        ("dp=two", "`two` is not a size"),
        ("99999999999999999999x1", "is not a size"),
    ] {
        let error = DeviceMesh::parse(text, None).unwrap_err();
        assert!(matches!(error, MeshError::Notation { .. }), "{text}: {error:?}");
        let message = error.to_string();
        assert!(message.contains(wrong) && message.contains("dp=2,sp=4"), "{text}: {message}");
    }
    assert!(matches!(DeviceMesh::parse("dp=2,dp=2", None), Err(MeshError::DuplicateName { .. })));
}

#[test]
fn the_fingerprint_is_pinned_and_sees_names_shape_and_order() {
    // A changed value would make ranks of two builds refuse each other: change it knowingly.
    let mesh = DeviceMesh::dp_sp(2, 2).unwrap();
    assert_eq!(mesh.fingerprint(), 0xfbf8_93f6_2ea3_8268);
    let others = [
        DeviceMesh::dp_sp(1, 4).unwrap(),
        DeviceMesh::dp_sp(4, 1).unwrap(),
        DeviceMesh::new(&[("sp", 2), ("dp", 2)], None).unwrap(),
        DeviceMesh::new(&[("d", 2), ("psp", 2)], None).unwrap(),
        DeviceMesh::new(&[("dp", 4)], None).unwrap(),
        DeviceMesh::with_ranks(&[("dp", 2), ("sp", 2)], vec![0, 2, 1, 3]).unwrap(),
    ];
    for other in &others {
        assert_ne!(other.fingerprint(), mesh.fingerprint(), "{other}");
        assert_ne!(other, &mesh);
    }
}

#[test]
fn drawing_shows_grid_groups_and_meaning() {
    let text = draw(&DeviceMesh::dp_sp(2, 4).unwrap());
    assert_eq!(
        text,
        "\
mesh dp=2,sp=4: 8 ranks

  dp\\sp │ 0 1 2 3
  ──────┼────────
      0 │ 0 1 2 3
      1 │ 4 5 6 7

axis  groups  size  ranks
dp         4     2  [0 4] [1 5] [2 6] [3 7]
sp         2     4  [0 1 2 3] [4 5 6 7]

sp groups exchange attention heads: each sequence is sharded over 4 ranks.
ZeRO partitions: 2 over dp (the default), 8 over dp × sp.
"
    );
}

#[test]
fn drawings_of_all_sizes_fit_a_terminal() {
    let (whole, cut) = (false, true);
    for (text, is_cut) in [
        ("1x1", whole),
        ("8x8", whole),
        ("x=1", whole),
        ("1x64", cut),
        ("64x1", cut),
        ("100x100", cut),
        ("1024x1024", cut),
        ("pod=8,pp=3,dp=16,sp=8", cut),
        ("x=500", cut),
    ] {
        let drawing = draw(&text.parse().unwrap());
        assert!(drawing.lines().all(|line| line.chars().count() <= 80), "{drawing}");
        assert!(drawing.lines().count() <= 100, "{drawing}");
        assert_eq!(drawing.contains('…'), is_cut, "{drawing}");
    }
    let three_axes = draw(&dp_cp_tp());
    assert!(three_axes.contains("dp=1\n  cp\\tp │ 0 1\n"), "{three_axes}");
    assert!(three_axes.contains("\n      1 │ 6 7\n"), "{three_axes}");
    assert!(!three_axes.contains("heads"), "no sp axis: {three_axes}");
    let single = draw(&DeviceMesh::dp_sp(1, 1).unwrap());
    assert!(
        single.starts_with("mesh dp=1,sp=1: 1 rank\n") && single.contains("ZeRO partitions: 1 over dp."),
        "{single}"
    );
}
