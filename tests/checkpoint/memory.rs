//! Copies in the memory of several nodes, which are directories here, and the restart after nodes are lost.

use super::training::{ADAGRAD, SGD, Setup, Trainee, config, model, on_mesh, setup};
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use ulysses::checkpoint::{
    Checkpoint, CheckpointError, Comparison, MANIFEST, MemoryCopies, NewestCopy, diff, saved_steps, step_name,
};
use ulysses::device::DeviceKind;
use ulysses::engine::{EngineError, StepReport};
use ulysses::estimate::{CopiedBytes, Workload};

const RANKS_PER_NODE: usize = 2;
const NODES: usize = 3;
/// Six ranks on three nodes, with a partition each.
const SIX: Setup = setup(6, 1, 3);

fn node(place: &TempDir, node: usize) -> PathBuf {
    place.path().join(format!("node{node}"))
}

/// Returns empty directories of all nodes.
fn nodes() -> TempDir {
    let place = tempfile::tempdir().unwrap();
    (0..NODES).for_each(|index| fs::create_dir(node(&place, index)).unwrap());
    place
}

/// Replaces a node by an empty one.
fn lose(place: &TempDir, index: usize) {
    fs::remove_dir_all(node(place, index)).unwrap();
    fs::create_dir(node(place, index)).unwrap();
}

fn open(place: &TempDir, rank: &Trainee) -> Result<MemoryCopies> {
    let dir = node(place, rank.all.rank() / RANKS_PER_NODE);
    Ok(rank.engine.memory_copies(rank.all.clone(), Some(&dir))?.unwrap())
}

/// Trains and copies after the 2nd and 3rd step, saves the 3rd on disk too, and returns the reports of the 4th and 5th.
fn trained(place: &TempDir, disk: &Path, setup: Setup) -> Vec<Vec<StepReport>> {
    on_mesh(setup, |rank| {
        let mut copies = open(place, rank)?;
        for steps in [2, 1] {
            rank.train(steps)?;
            let record = rank.record();
            rank.engine.copy_to_memory(&mut copies, record)?;
        }
        rank.save(disk)?;
        rank.train(2)
    })
}

/// Restores the newest copy.
fn restore(place: &TempDir, rank: &mut Trainee) -> Result<(Option<Checkpoint>, Vec<String>)> {
    let copies = open(place, rank)?;
    let NewestCopy { checkpoint, refused } = copies.newest()?;
    let Some(found) = checkpoint else { return Ok((None, refused)) };
    let checkpoint = rank.engine.gather_from_memory(&copies, found)?;
    rank.load(&checkpoint)?;
    Ok((Some(checkpoint), refused))
}

fn numbers(reports: &[Vec<StepReport>]) -> Vec<Vec<(u64, u64, u64)>> {
    let of = |report: &StepReport| (report.step, report.loss.to_bits(), report.grad_norm.to_bits());
    reports.iter().map(|reports| reports.iter().map(of).collect()).collect()
}

/// Returns the partitions whose files of one kind a node has for a step.
fn partitions(place: &TempDir, index: usize, step: u64) -> Vec<usize> {
    let dir = node(place, index).join(step_name(step));
    let has = |partition: &usize| dir.join(format!("exp_avg.{partition:05}-of-00006.safetensors")).exists();
    (0..6).filter(has).collect()
}

#[test]
fn every_node_has_the_files_of_its_ranks_and_of_their_partners_of_the_newest_copy_only() {
    let (place, disk) = (nodes(), tempfile::tempdir().unwrap());
    trained(&place, disk.path(), SIX);
    for (index, expected) in [[0, 1, 4, 5], [0, 1, 2, 3], [2, 3, 4, 5]].into_iter().enumerate() {
        assert_eq!(saved_steps(&node(&place, index)).unwrap(), [3], "node {index}");
        assert_eq!(partitions(&place, index, 3), expected, "node {index}");
        assert_eq!(fs::read_dir(node(&place, index)).unwrap().count(), 1, "nothing else");
    }
}

/// Returns the bytes of the elements in a node's files.
fn element_bytes(place: &TempDir, index: usize) -> u64 {
    let dir = node(place, index).join(step_name(3));
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let states = paths.filter(|path| path.extension().is_some_and(|name| name == "safetensors"));
    // A file begins with the length of its header.
    let header = |bytes: &[u8]| 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
    states.map(|path| fs::read(path).unwrap()).map(|bytes| bytes.len() as u64 - header(&bytes)).sum()
}

#[test]
fn the_plan_of_the_copies_is_what_the_nodes_have() {
    let copies = r#"{ "checkpoint": { "memory_interval": 1 }, "ulysses": { "seq_len": 8 } }"#;
    for case in [
        SIX,
        setup(3, 2, 2),
        setup(2, 3, 0),
        Setup { optimizer: SGD, ..SIX },
        Setup { optimizer: ADAGRAD, ..setup(3, 2, 1) },
    ] {
        let case = Setup { extra: copies, ..case };
        let (place, disk) = (nodes(), tempfile::tempdir().unwrap());
        trained(&place, disk.path(), case);
        let workload = |ranks_per_node| Workload {
            config: config(case),
            model: model(),
            document_len: None,
            ranks_per_node,
            device: DeviceKind::Cpu,
        };
        let planned = workload(RANKS_PER_NODE).copied_bytes().unwrap().unwrap();
        let stored = (0..NODES).map(|index| element_bytes(&place, index)).max().unwrap();
        assert_eq!((planned.per_node, planned.peak_per_node), (stored, 2 * stored), "{case:?}");
        // All ranks on one node have no copies elsewhere.
        let alone = workload(6).copied_bytes().unwrap().unwrap();
        let whole: u64 = (0..NODES).map(|index| element_bytes(&place, index)).sum::<u64>() / 2;
        let expected = CopiedBytes {
            per_rank: planned.per_rank,
            per_node: whole,
            of_node_before: 0,
            peak_per_node: 2 * whole,
        };
        assert_eq!(alone, expected, "{case:?}");
    }
    let none = Workload {
        config: config(SIX),
        model: model(),
        document_len: None,
        ranks_per_node: 2,
        device: DeviceKind::Cpu,
    };
    assert_eq!(none.copied_bytes().unwrap(), None);
}

#[test]
fn a_restart_without_any_one_node_repeats_the_run_bit_for_bit() {
    let (place, disk) = (nodes(), tempfile::tempdir().unwrap());
    let uninterrupted = trained(&place, disk.path(), SIX);
    // Each time on the directories that the restart before has completed.
    for lost in [None, Some(0), Some(1), Some(2)] {
        lost.into_iter().for_each(|index| lose(&place, index));
        let resumed = on_mesh(SIX, |rank| {
            let (checkpoint, refused) = restore(&place, rank)?;
            assert_eq!((checkpoint.unwrap().manifest().progress.step, refused), (3, vec![]), "{lost:?}");
            rank.train(2)
        });
        assert_eq!(numbers(&resumed), numbers(&uninterrupted), "{lost:?}");
        if let Some(index) = lost {
            let own = vec![2 * index, 2 * index + 1];
            assert_eq!(partitions(&place, index, 3), own, "only what its ranks load was sent");
        }
        trained_again(&place, disk.path());
    }
}

/// Restores the state of `disk` and copies it once more, so that all nodes have their files.
fn trained_again(place: &TempDir, disk: &Path) {
    on_mesh(SIX, |rank| {
        rank.resume(disk)?;
        let mut copies = open(place, rank)?;
        let record = rank.record();
        Ok(rank.engine.copy_to_memory(&mut copies, record)?)
    });
}

#[test]
fn fewer_nodes_load_the_same_state_on_a_smaller_mesh() {
    let (place, disk) = (nodes(), tempfile::tempdir().unwrap());
    trained(&place, disk.path(), SIX);
    lose(&place, 2);
    let again = tempfile::tempdir().unwrap();
    on_mesh(setup(2, 2, 3), |rank| {
        restore(&place, rank)?;
        rank.save(again.path())
    });
    let open = |dir: &TempDir| Checkpoint::open(&dir.path().join(step_name(3))).unwrap();
    let (saved, loaded) = (open(&disk), open(&again));
    assert_eq!(loaded.manifest().num_partitions, 2);
    let comparisons = diff(&saved, &loaded).unwrap();
    assert_eq!(comparisons.len(), 3 * 21);
    comparisons.into_iter().for_each(|(tensor, found)| assert_eq!(found, Comparison::Equal, "{tensor:?}"));
}

#[test]
fn two_neighbors_lost_leave_no_copy_and_the_lost_file_is_named() {
    let (place, disk) = (nodes(), tempfile::tempdir().unwrap());
    trained(&place, disk.path(), SIX);
    lose(&place, 0);
    lose(&place, 1);
    let results = on_mesh(SIX, |rank| restore(&place, rank));
    for (checkpoint, refused) in results {
        assert!(checkpoint.is_none());
        let [refused] = refused.as_slice() else { panic!("{refused:?}") };
        let lost = "the copy of step 3 is incomplete: no node has ";
        assert!(refused.starts_with(lost) && refused.contains(".00000-of-00006."), "{refused}");
    }
}

#[test]
fn damaged_files_and_partial_copies_are_ignored_while_an_intact_file_is_left() {
    let (place, disk) = (nodes(), tempfile::tempdir().unwrap());
    let uninterrupted = trained(&place, disk.path(), SIX);
    let file =
        |index: usize| node(&place, index).join(step_name(3)).join("exp_avg.00000-of-00006.safetensors");
    let mut bytes = fs::read(file(0)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file(0), &bytes).unwrap();
    // A copy that was being made when the ranks were killed, and a foreign manifest.
    fs::create_dir(node(&place, 1).join(".step_00000004.saving")).unwrap();
    let foreign = node(&place, 2).join(step_name(9));
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join(MANIFEST), "{}").unwrap();
    let resumed = on_mesh(SIX, |rank| {
        let (checkpoint, refused) = restore(&place, rank)?;
        assert_eq!(checkpoint.unwrap().manifest().progress.step, 3);
        assert_eq!(refused.len(), 2, "{refused:?}");
        assert!(refused[0].contains("node0") && refused[0].contains("file is damaged"), "{refused:?}");
        assert!(refused[1].contains("node2") && refused[1].contains("not a manifest"), "{refused:?}");
        rank.train(2)
    });
    assert_eq!(numbers(&resumed), numbers(&uninterrupted));
    assert!(!node(&place, 1).join(".step_00000004.saving").exists());
    // Without the intact one, the copy is lost.
    fs::write(file(0), &bytes).unwrap();
    fs::write(file(1), &bytes).unwrap();
    let none = on_mesh(SIX, |rank| Ok(restore(&place, rank)?.0.is_none()));
    assert_eq!(none, [true; 6]);
}

#[test]
fn a_failed_copy_is_an_error_on_all_ranks_and_leaves_the_one_before() {
    let place = nodes();
    let errors = on_mesh(SIX, |rank| {
        let mut copies = open(&place, rank)?;
        rank.train(1)?;
        let record = rank.record();
        rank.engine.copy_to_memory(&mut copies, record)?;
        rank.train(1)?;
        rank.all.start_barrier()?.wait()?;
        if rank.all.rank() == 0 {
            // No directory can be made in a file.
            fs::rename(node(&place, 1), place.path().join("away"))?;
            fs::write(node(&place, 1), "in the way")?;
        }
        rank.all.start_barrier()?.wait()?;
        let record = rank.record();
        let failed = rank.engine.copy_to_memory(&mut copies, record).unwrap_err();
        rank.train(1)?;
        Ok(failed)
    });
    for error in errors {
        let EngineError::Checkpoint(error) = error else { panic!("{error}") };
        assert!(matches!(&*error, CheckpointError::NotSaved { step: 2, rank: 2, .. }), "{error}");
    }
    fs::remove_file(node(&place, 1)).unwrap();
    fs::rename(place.path().join("away"), node(&place, 1)).unwrap();
    for index in 0..NODES {
        assert_eq!(saved_steps(&node(&place, index)).unwrap(), [1]);
        assert_eq!(fs::read_dir(node(&place, index)).unwrap().count(), 1, "node {index}");
    }
}

#[test]
fn without_a_directory_on_every_node_there_are_no_copies() {
    let place = nodes();
    let are_none = on_mesh(setup(2, 1, 1), |rank| {
        let dir = (rank.all.rank() == 0).then(|| node(&place, 0));
        Ok(rank.engine.memory_copies(rank.all.clone(), dir.as_deref())?.is_none())
    });
    assert_eq!(are_none, [true; 2]);
}
