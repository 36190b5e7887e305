//! Who works with whom: the device mesh.
//!
//! Parallelism of several kinds at once needs every rank in several groups. A mesh arranges
//! the ranks on named axes, the last one fastest, so that neighbors in rank (the same machine,
//! usually) are neighbors on the axis that talks most. If you know PyTorch's `DeviceMesh`,
//! you know this one; its calls stand in the comments.
//!
//! ```text
//! cargo run --release --example 02_mesh
//! ```

use anyhow::Result;
use ulysses::comm::{LaunchOptions, MeshGroups, ProcessGroupExt, ReduceOp, launch};
use ulysses::mesh::{DeviceMesh, draw};

fn main() -> Result<()> {
    // init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "sp")), and what `--mesh 2x4` means:
    // two rows of data, each of whose sequences four ranks share.
    let mesh = DeviceMesh::parse("2x4", None)?;
    println!("{}", draw(&mesh));

    // A mesh is integers and nothing else, so questions about any rank can be asked anywhere.
    println!("rank 6 stands at {:?} on {:?}", mesh.coordinate(6)?, mesh.axis_names());
    println!("its sp peers are {:?}, its dp peers {:?}", mesh.group_of("sp", 6)?, mesh.group_of("dp", 6)?);

    // One size may be left to be worked out from the number of ranks.
    let pods = DeviceMesh::new(&[("pod", 2), ("dp", -1), ("sp", 2)], Some(8))?;
    println!("\n{pods}");
    // mesh["pod", "sp"]: the part of the mesh that a rank sees along some axes.
    println!("pod × sp of rank 5: {}", pods.slice_for(&["pod", "sp"], 5)?);
    // mesh["pod", "dp"]._flatten("dp"): data parallelism over pods and within them.
    let flat = pods.flatten(&["pod", "dp"], "dp")?;
    println!("pod and dp in one: {flat}, whose dp peers of rank 5 are {:?}", flat.group_of("dp", 5)?);
    // …and back: an axis of 4 as 2 × 2.
    let split = flat.unflatten("dp", &[("pod", 2), ("dp", -1)])?;
    println!("and apart again: {split}, the same mesh: {}", split == pods);

    // Communication begins here: `MeshGroups` makes one process group for each distinct list of
    // ranks, in the same order everywhere; ranks that brought different meshes would be told.
    println!("\nsums over the ranks' numbers, along sp, along dp and over all:");
    let sums = launch(mesh.world_size(), &LaunchOptions::default(), |rank| -> Result<_> {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let mine = [rank.rank as i64];
        // mesh.get_group("sp")
        let along = |axis| Ok::<_, anyhow::Error>(groups.get_group(axis)?);
        Ok([
            along("sp")?.all_reduce_values(&mine, ReduceOp::Sum)?[0],
            along("dp")?.all_reduce_values(&mine, ReduceOp::Sum)?[0],
            groups.whole()?.all_reduce_values(&mine, ReduceOp::Sum)?[0],
        ])
    })?;
    for (rank, [sp, dp, all]) in sums.into_iter().enumerate() {
        println!("  rank {rank}: {sp:2} {dp:2} {all:2}");
    }

    // What cannot be is refused with what could be.
    println!("\n{}", DeviceMesh::new(&[("dp", 3), ("sp", -1)], Some(8)).expect_err("3 does not divide 8"));
    println!("{}", mesh.group_of("tp", 0).expect_err("there is no such axis"));
    Ok(())
}
