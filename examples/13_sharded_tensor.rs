//! Sharded tensors: a tensor of which each rank of a mesh has a part, as PyTorch's `DTensor`. The comments show the calls of
//! PyTorch's tutorial.
//!
//! ```text
//! cargo run --release --example 13_sharded_tensor
//! ```

use anyhow::{Result, ensure};
use std::path::Path;
use std::sync::Arc;
use ulysses::candle::DType;
use ulysses::checkpoint::{LocalStorage, load_tensors, save_tensors};
use ulysses::placement::{Layout, Placement::*, ShardedTensor, draw};
use ulysses::prelude::*;

fn main() -> Result<()> {
    // mesh = init_device_mesh("cpu", (4,))
    let mesh = DeviceMesh::new(&[("x", 4)], None)?;

    // visualize_sharding(my_dtensor): a picture needs integers only.
    let rows = Layout::on_mesh([7, 6], &mesh, &[Shard(0)])?;
    println!("{}", draw(&rows, mesh.ranks(), DType::F32)?);

    let texts = launch(mesh.world_size(), &LaunchOptions::default(), |rank| -> Result<Vec<String>> {
        let groups = Arc::new(MeshGroups::new(&mesh, rank.group.clone())?);
        one_axis(&groups)
    })?;
    let line = |at: usize| (&texts[0][at], &texts[3][at]);
    println!("rows: {} of [7, 6] on rank 0, {} on rank 3", line(0).0, line(0).1);
    println!("columns: {} on rank 0, {} on rank 3", line(1).0, line(1).1);
    println!("replicated: {} on every rank", line(2).0);
    println!("bytes to replicate: {}", line(3).0);
    println!("\non rank 3:\n{}", line(4).1);

    // mesh_2d = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    let mesh = DeviceMesh::new(&[("dp", 2), ("tp", 2)], None)?;
    let texts = launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
        two_axes(&Arc::new(MeshGroups::new(&mesh, rank.group.clone())?))
    })?;
    println!("\n{}", texts[0]);

    let dir = tempfile::tempdir()?;
    let texts = launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
        let groups = Arc::new(MeshGroups::new(&mesh, rank.group.clone())?);
        save_and_load(&groups, &dir.path().join("tensors"))
    })?;
    println!("{}", texts[0]);
    Ok(())
}

fn one_axis(groups: &Arc<MeshGroups>) -> Result<Vec<String>> {
    // big_tensor = torch.randn(7, 6)
    let whole = Tensor::arange(0_f32, 42.0, &Device::Cpu)?.reshape((7, 6))?;
    // my_dtensor = distribute_tensor(big_tensor, mesh, [Shard(dim=0)]): 7 rows on 4 ranks.
    let rows = ShardedTensor::distribute(groups, &whole, &[Shard(0)])?;

    // DTensor.from_local(local_tensor, mesh, [Shard(0)]): the ranks agree on the logical shape, also of uneven shards.
    let same = ShardedTensor::from_local(groups, rows.local(), &[Shard(0)], None)?;
    ensure!(same.shape() == [7, 6] && same.equals(&rows)?);

    // columns = rows.redistribute(mesh, [Shard(1)], async_op=True): an all-to-all, while this rank computes.
    let pending = rows.start_redistribute(&[Shard(1)])?;
    let norm = rows.local().sqr()?.sum_all()?;
    ensure!(norm.to_scalar::<f32>()? > 0.0);
    let columns = pending.wait()?;

    // replica = columns.redistribute(mesh, [Replicate()]): a gather, with bytes that are known before.
    let group = groups.get_group("x")?;
    let before = group.stats().total().bytes_sent;
    let planned = columns.sent_bytes(&[Replicate])?;
    let replica = columns.redistribute(&[Replicate])?;
    let sent = group.stats().total().bytes_sent - before;

    // replica.to_local(), my_dtensor.full_tensor()
    ensure!(replica.local().to_vec2::<f32>()? == rows.full_tensor()?.to_vec2::<f32>()?);
    let dims = |tensor: &ShardedTensor| format!("{:?}", tensor.local().dims());
    let bytes = format!("{planned} planned, {sent} sent");
    Ok(vec![dims(&rows), dims(&columns), dims(&replica), bytes, rows.to_string()])
}

/// Saves rows, and loads columns.
fn save_and_load(groups: &Arc<MeshGroups>, dir: &Path) -> Result<String> {
    let x = Tensor::arange(0_f32, 42.0, &Device::Cpu)?.reshape((7, 6))?;
    let rows = ShardedTensor::distribute(groups, &x, &[Shard(0), Replicate])?;

    // dcp.save({"x": rows}, checkpoint_id=dir): each slice is written once.
    save_tensors(groups, dir, &[("x".to_owned(), rows.clone())].into(), &LocalStorage)?;

    // dcp.load(…): in any placements, on any mesh. A directory or file of Hugging Face's is read in the same way.
    let loaded = load_tensors(groups, dir, |_, _| Some(vec![Replicate, Shard(1)]))?;
    ensure!(loaded["x"].equals(&rows)?);
    Ok(format!("loaded {:?}: {:?}", loaded["x"].placements(), loaded["x"].local().dims()))
}

fn two_axes(groups: &Arc<MeshGroups>) -> Result<String> {
    // The input is sharded over dp by rows, and the inner dimension of the product over tp.
    let x = Tensor::arange(0_f32, 42.0, &Device::Cpu)?.reshape((7, 6))?;
    let w = Tensor::arange(0_f32, 24.0, &Device::Cpu)?.reshape((6, 4))?;
    let sharded = ShardedTensor::distribute(groups, &x, &[Shard(0), Shard(1)])?;
    let weight = ShardedTensor::distribute(groups, &w, &[Replicate, Shard(0)])?;

    // x @ w: placements follow the operation. The sum over tp is pending until it is needed.
    let product = sharded.matmul(&weight)?;
    let is_equal = product.full_tensor()?.to_vec2::<f32>()? == x.matmul(&w)?.to_vec2::<f32>()?;
    let verdict = if is_equal { "equal" } else { "different" };
    let text = format!("x · w: {:?} without communication; whole: {verdict}", product.placements());

    // What PyTorch would redistribute implicitly is an error here. It names the call.
    let bias = ShardedTensor::distribute(groups, &x.narrow(1, 0, 4)?.contiguous()?, &[Shard(0), Replicate])?;
    let refused = product.add(&bias).expect_err("a sum and a replica");
    let added = product.add(&bias.redistribute(&[Shard(0), Partial])?)?;
    // A reduce-scatter, then local computation.
    let active = added.redistribute(&[Shard(0), Shard(1)])?.map(Tensor::relu)?;
    Ok(format!("{text}\n{refused}\nnorm {}", active.norm()?.local()))
}
