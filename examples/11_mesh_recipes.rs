//! Meshes for custom parallelism: the recipes of PyTorch's "Getting Started with `DeviceMesh`".
//!
//! The comments show PyTorch's calls. Each recipe ends with its number of splits of the world: what
//! NCCL would create as communicators.
//!
//! ```text
//! cargo run --release --example 11_mesh_recipes
//! ```

use anyhow::Result;
use std::sync::Arc;
use ulysses::comm::{
    CollectiveOp, LaunchOptions, MeshGroups, ProcessGroup, ProcessGroupExt, RankContext, ReduceOp, launch,
};
use ulysses::mesh::DeviceMesh;

const RANKS: usize = 8;
/// The rank whose groups are printed.
const SHOWN: usize = 5;

type Recipe = fn(RankContext) -> Result<String>;

fn main() -> Result<()> {
    let recipes: [(&str, Recipe); 4] = [
        ("HSDP by hand", hsdp_by_hand),
        ("HSDP by mesh", hsdp_by_mesh),
        ("slices of a 3-D mesh", slices_of_three_axes),
        ("custom ranks, and groups that exist", custom_ranks),
    ];
    for (title, recipe) in recipes {
        let shown = launch(RANKS, &LaunchOptions::default(), recipe)?.swap_remove(SHOWN);
        println!("{title}, rank {SHOWN}:\n{shown}");
    }
    Ok(())
}

/// Two nodes of four ranks: the model is sharded within a node and replicated across nodes.
fn hsdp_by_hand(rank: RankContext) -> Result<String> {
    let world = &rank.group;
    // shard_groups = (dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7]))
    // One split creates all groups of a color at once; the key orders the ranks.
    let shard = world.split("shard", Some(rank.rank / 4), rank.rank)?.expect("every rank has a color");
    // for i in range(4): dist.new_group([i, i + 4])
    let replicate = world.split("replicate", Some(rank.rank % 4), rank.rank)?.expect("as above");
    report(world, &[shard, replicate])
}

fn hsdp_by_mesh(rank: RankContext) -> Result<String> {
    let world = &rank.group;
    // mesh_2d = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    let mesh = DeviceMesh::new(&[("replicate", 2), ("shard", 4)], Some(rank.world_size))?;
    let mesh_2d = MeshGroups::new(&mesh, world.clone())?;
    // replicate_group = mesh_2d.get_group(mesh_dim="replicate")
    let (replicate, shard) = (mesh_2d.get_group("replicate")?, mesh_2d.get_group("shard")?);
    // dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=…): over the ranks of a node, then over the replicas.
    let gradient = shard.all_reduce_values(&[rank.rank as f64], ReduceOp::Average)?;
    let gradient = replicate.all_reduce_values(&gradient, ReduceOp::Average)?;
    assert_eq!(gradient, [3.5], "the average of all ranks");
    report(world, &[shard, replicate])
}

/// HSDP and tensor parallelism. Slices have the groups of the mesh and create none.
fn slices_of_three_axes(rank: RankContext) -> Result<String> {
    let world = &rank.group;
    // mesh_3d = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    let mesh = DeviceMesh::new(&[("replicate", 2), ("shard", 2), ("tp", 2)], Some(rank.world_size))?;
    let mesh_3d = MeshGroups::new(&mesh, world.clone())?;
    // hsdp_mesh = mesh_3d["replicate", "shard"]
    let hsdp = mesh_3d.slice(&["replicate", "shard"])?;
    // tp_mesh = mesh_3d["tp"]
    let tp = mesh_3d.slice(&["tp"])?;
    // replicate_group = hsdp_mesh["replicate"].get_group(); shard_group = hsdp_mesh["shard"].get_group()
    let mut groups = hsdp.get_all_groups()?;
    // tp_group = tp_mesh.get_group()
    groups.push(tp.get_group("tp")?);
    // data_group = hsdp_mesh._flatten("data").get_group(): the only one that is new.
    groups.push(hsdp.flatten(&["replicate", "shard"], "data")?.get_group("data")?);
    report(world, &groups)
}

fn custom_ranks(rank: RankContext) -> Result<String> {
    let world = &rank.group;
    // DeviceMesh("cuda", [[0, 2, 4, 6], [1, 3, 5, 7]], mesh_dim_names=("dp", "sp")): ranks that a
    // scheduler has placed on two nodes in turn.
    let mesh = DeviceMesh::with_ranks(&[("dp", 2), ("sp", 4)], vec![0, 2, 4, 6, 1, 3, 5, 7])?;
    let sp = world.split("my sp", Some(rank.rank % 2), rank.rank)?.expect("every rank has a color");
    let dp = world.split("my dp", Some(rank.rank / 2), rank.rank)?.expect("every rank has a color");
    // DeviceMesh.from_group([dp_group, sp_group], "cuda", mesh=…, mesh_dim_names=("dp", "sp"))
    let groups = MeshGroups::from_groups(&mesh, world.clone(), &[dp, sp])?;
    report(world, &groups.get_all_groups()?)
}

/// The members of some groups, and how many splits have created them.
fn report(world: &Arc<dyn ProcessGroup>, groups: &[Arc<dyn ProcessGroup>]) -> Result<String> {
    world.barrier()?;
    let line = |group: &Arc<dyn ProcessGroup>| format!("  {:10} {:?}\n", group.name(), group.global_ranks());
    let lines: String = groups.iter().map(line).collect();
    let splits = world.stats().get(CollectiveOp::Split).calls;
    Ok(format!("{lines}  {splits} splits\n"))
}
