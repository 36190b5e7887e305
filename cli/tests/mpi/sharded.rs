//! Sharded tensors whose ranks are processes.

use crate::support::comm::Backend;
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use ulysses::checkpoint::{CheckpointError, LocalStorage, load_tensors, save_tensors};
use ulysses::comm::{CommError, MeshGroups, ProcessGroup, ProcessGroupExt};
use ulysses::mesh::DeviceMesh;
use ulysses::placement::Placement::{Partial, Replicate, Shard};
use ulysses::placement::{PlacementError, ShardedTensor};

/// Uneven shards, which two redistributions move at the same time, saved and loaded.
pub(crate) fn sharded_tensors_move_at_the_same_time_and_are_saved_and_loaded(mpi: &dyn Backend) {
    mpi.run(4, |world| {
        // The first rank's directory, for all.
        let dir = if world.rank() == 0 { Some(tempfile::tempdir().unwrap()) } else { None };
        let own = dir.as_ref().map_or_else(Vec::new, |dir| dir.path().to_str().unwrap().as_bytes().to_vec());
        let path = String::from_utf8(world.all_gather_varied(&own)?.concat()).unwrap();
        let outcome = run(&world, &Path::new(&path).join("tensors"));
        world.barrier()?;
        outcome.map_err(|error| CommError::Tensor(error.to_string()))
    });
}

fn run(world: &Arc<dyn ProcessGroup>, dir: &Path) -> Result<(), CheckpointError> {
    let mesh = DeviceMesh::new(&[("a", 2), ("b", 2)], None).unwrap();
    let groups = Arc::new(MeshGroups::new(&mesh, world.clone())?);
    let failed = |source: PlacementError| CheckpointError::ShardedTensor {
        tensor: "x".to_owned(),
        source: Box::new(source),
    };
    let whole = Tensor::arange(0_f32, 35.0, &Device::Cpu).and_then(|x| x.reshape((7, 5)));
    let whole = whole.map_err(|error| failed(error.into()))?;
    let sent =
        || groups.get_all_groups().map(|all| all.iter().map(|g| g.stats().total().bytes_sent).sum::<u64>());

    let x = ShardedTensor::distribute(&groups, &whole, &[Shard(0), Shard(1)]).map_err(failed)?;
    let targets = [[Shard(1), Shard(0)], [Replicate, Shard(1)], [Shard(0), Partial]];
    let before = sent()?;
    let started = targets.map(|to| x.start_redistribute(&to).map_err(failed));
    let started = started.into_iter().collect::<Result<Vec<_>, CheckpointError>>()?;
    let moved = started.into_iter().map(|pending| pending.wait().map_err(failed));
    let moved = moved.collect::<Result<Vec<_>, CheckpointError>>()?;
    let planned = targets.map(|to| x.sent_bytes(&to).unwrap()).into_iter().sum::<u64>();
    assert_eq!(sent()? - before, planned);
    assert!(moved.iter().all(|tensor| tensor.equals(&x).unwrap()));

    save_tensors(&groups, dir, &BTreeMap::from([("x".to_owned(), moved[0].clone())]), &LocalStorage)?;
    let loaded = load_tensors(&groups, dir, |_, shape| {
        assert_eq!(shape, [7, 5]);
        Some(vec![Replicate, Shard(0)])
    })?;
    assert!(loaded["x"].dtype() == DType::F32 && loaded["x"].equals(&x).map_err(failed)?);
    Ok(())
}
