//! The device mesh: which ranks communicate with each other.
//!
//! With several kinds of parallelism, every rank is in several groups. A mesh arranges the ranks
//! on named axes, the last one fastest, so that consecutive ranks (usually on the same machine)
//! are neighbors on the axis with the most communication. It works like PyTorch's `DeviceMesh`;
//! the comments show PyTorch's calls.
//!
//! ```text
//! cargo run --release --example 02_mesh
//! ```

use anyhow::Result;
use ulysses::comm::{LaunchOptions, MeshGroups, ProcessGroupExt, ReduceOp, launch};
use ulysses::mesh::{DeviceMesh, draw};

fn main() -> Result<()> {
    // init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "sp")), or `--mesh 2x4`: two
    // data-parallel groups, each of four ranks that share every sequence.
    let mesh = DeviceMesh::parse("2x4", None)?;
    println!("{}", draw(&mesh));

    // A mesh is only integers, so every rank can query any other rank.
    println!("rank 6 has the coordinates {:?} on {:?}", mesh.coordinate(6)?, mesh.axis_names());
    println!("its sp peers are {:?}, its dp peers {:?}", mesh.group_of("sp", 6)?, mesh.group_of("dp", 6)?);

    // One size may be inferred from the number of ranks.
    let pods = DeviceMesh::new(&[("pod", 2), ("dp", -1), ("sp", 2)], Some(8))?;
    println!("\n{pods}");
    // mesh["pod", "sp"]: the part of the mesh that a rank sees along some axes.
    println!("pod × sp of rank 5: {}", pods.slice_for(&["pod", "sp"], 5)?);
    // mesh["pod", "dp"]._flatten("dp"): data parallelism over pods and within them.
    let flat = pods.flatten(&["pod", "dp"], "dp")?;
    println!("pod and dp flattened: {flat}; the dp peers of rank 5 are {:?}", flat.group_of("dp", 5)?);
    // …and back: an axis of 4 as 2 × 2.
    let split = flat.unflatten("dp", &[("pod", 2), ("dp", -1)])?;
    println!("unflattened: {split}, the same mesh: {}", split == pods);

    // Communication starts here: `MeshGroups` creates one process group per distinct list of
    // ranks, in the same order on all ranks; different meshes on different ranks are an error.
    println!("\nsums of the rank numbers, along sp, along dp and over all ranks:");
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

    // Errors say what would be valid.
    println!("\n{}", DeviceMesh::new(&[("dp", 3), ("sp", -1)], Some(8)).expect_err("3 does not divide 8"));
    println!("{}", mesh.group_of("tp", 0).expect_err("there is no such axis"));
    Ok(())
}
