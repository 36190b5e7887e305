//! Sharded tensors that a killed process saves: `save_tensors`.

use crate::cases::{Outcome, SIGKILL, child};
use crate::sample::{axes, sampled};
use crate::storage::{Fault, FaultyStorage};
use anyhow::Result;
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::Arc;
use ulysses::candle::{Device, Tensor};
use ulysses::checkpoint::{load_tensors, save_tensors};
use ulysses::comm::{LaunchOptions, MeshGroups, ProcessGroupExt, launch};
use ulysses::mesh::DeviceMesh;
use ulysses::placement::Placement::{self, Replicate, Shard};
use ulysses::placement::ShardedTensor;

pub(crate) const ALL: [(&str, fn()); 1] =
    [("tensors_of_a_save_killed_at_any_operation_are_the_old_ones_or_the_new_ones", killed_anywhere)];

/// Directories of tensors, the older first.
const DIRS: [&str; 2] = ["old", "new"];

/// Each with its shape and its placements on 2 × 2 ranks.
const TENSORS: [(&str, [usize; 2], [Placement; 2]); 3] = [
    ("rows", [7, 3], [Shard(0), Shard(0)]),
    ("columns", [5, 6], [Replicate, Shard(1)]),
    ("everywhere", [4, 2], [Replicate, Replicate]),
];

/// Values that encode position, tensor and directory.
fn whole(dir: usize, tensor: usize) -> Tensor {
    let shape = TENSORS[tensor].1;
    let first = (1000 * dir + 100 * tensor) as f32;
    let values = (0..shape.iter().product()).map(|position: usize| first + position as f32);
    Tensor::from_vec(values.collect::<Vec<_>>(), &shape, &Device::Cpu).unwrap()
}

/// The child: saves the directories that are not there.
pub(crate) fn save(parent: &Path, fault: Fault, at: usize) -> Result<()> {
    let (storage, mesh) = (FaultyStorage::new(fault, at), DeviceMesh::dp_sp(2, 2)?);
    launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
        let is_first = rank.rank == 0;
        let groups = Arc::new(MeshGroups::new(&mesh, rank.group)?);
        for (index, name) in DIRS.iter().enumerate() {
            let exists = parent.join(name).exists();
            // The first rank may create it before another one looks.
            groups.whole()?.barrier()?;
            if exists {
                continue;
            }
            let tensors = TENSORS.iter().enumerate().map(|(tensor, (name, _, placements))| {
                let sharded = ShardedTensor::distribute(&groups, &whole(index, tensor), placements)?;
                Ok(((*name).to_owned(), sharded))
            });
            save_tensors(
                &groups,
                &parent.join(name),
                &tensors.collect::<Result<BTreeMap<_, _>>>()?,
                &storage,
            )?;
            if is_first {
                println!("saved {index}");
            }
        }
        Ok::<_, anyhow::Error>(())
    })?;
    println!("operations {}", storage.operations().join(" "));
    Ok(())
}

/// Whether a directory is there. If it is, all of its tensors are, with its values.
fn is_whole(parent: &Path, dir: usize, label: &str) -> bool {
    let path = parent.join(DIRS[dir]);
    if !path.exists() {
        return false;
    }
    let mesh = DeviceMesh::dp_sp(1, 1).unwrap();
    let loaded = launch(1, &LaunchOptions::default(), |rank| {
        let groups = Arc::new(MeshGroups::new(&mesh, rank.group)?);
        let loaded = load_tensors(&groups, &path, |_, _| Some(vec![Replicate; 2]))?;
        Ok::<_, anyhow::Error>(
            loaded.into_iter().map(|(name, tensor)| (name, tensor.local().clone())).collect(),
        )
    });
    let loaded: BTreeMap<String, Tensor> =
        loaded.unwrap_or_else(|error| panic!("{label}: {}: {error:#?}", DIRS[dir])).remove(0);
    assert_eq!(loaded.len(), TENSORS.len(), "{label}");
    for (tensor, (name, ..)) in TENSORS.iter().enumerate() {
        let [got, expected] =
            [&loaded[*name], &whole(dir, tensor)].map(|values| values.to_vec2::<f32>().unwrap());
        assert_eq!(got, expected, "{label}: {name} of {}", DIRS[dir]);
    }
    true
}

fn run(parent: &Path, fault: Fault, at: usize) -> Outcome {
    let (fault, at) = (fault_name(fault), at.to_string());
    child(&["--tensors".as_ref(), parent.as_ref(), fault.as_ref(), at.as_ref()])
}

fn killed_anywhere() {
    let reference = tempfile::tempdir().unwrap();
    let operations = run(reference.path(), Fault::None, 0).operations;
    assert!(operations.len() > 30, "two saves of four files are more than {operations:?}");
    assert!([0, 1].into_iter().all(|dir| is_whole(reference.path(), dir, "no fault")));
    let cases = [Fault::Kill, Fault::PowerCut]
        .into_iter()
        .flat_map(|fault| (0..operations.len()).map(move |at| (fault, at)));
    for (fault, at) in sampled(cases, |(fault, at)| {
        let (name, operation, save) = (fault_name(*fault), &operations[*at], at * 2 / operations.len());
        axes![name, operation, save]
    }) {
        let parent = tempfile::tempdir().unwrap();
        let label = format!("{fault:?} at operation {at} of {}", operations.len());
        let failed = run(parent.path(), fault, at);
        assert_eq!(failed.output.status.signal(), Some(SIGKILL), "{label}: {failed:?}");
        let there = [0, 1].map(|dir| is_whole(parent.path(), dir, &label));
        for saved in &failed.saved {
            assert!(there[*saved as usize], "{label}: {} was saved", DIRS[*saved as usize]);
        }
        // The next process saves what is missing, and leaves nothing of the killed one behind.
        let next = run(parent.path(), Fault::None, 0);
        assert!(next.output.status.success(), "{label}: {next:?}");
        assert!([0, 1].into_iter().all(|dir| is_whole(parent.path(), dir, &label)), "{label}");
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 2, "{label}");
    }
}

fn fault_name(fault: Fault) -> &'static str {
    Fault::ALL.into_iter().find(|(_, known)| *known == fault).map_or("", |(name, _)| name)
}
