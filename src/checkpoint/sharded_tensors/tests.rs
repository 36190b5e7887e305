//! Tensors saved on one mesh and loaded on another. Every element encodes its position.

use super::*;
use crate::checkpoint::{LocalStorage, StorageFile};
use crate::comm::{LaunchOptions, launch};
use crate::mesh::DeviceMesh;
use Placement::{Partial, Replicate, Shard};
use candle_core::{DType, Tensor};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config as Settings, TestRunner};
use std::fs;
use std::io;
use ulysses_kernels::tensor::{from_slice, to_vec, zeros};

type Outcome<T> = Result<T, CheckpointError>;

/// A mesh of at most six ranks, and numbers that choose the placements of two tensors.
#[derive(Debug, Clone)]
struct Side {
    sizes: Vec<usize>,
    placements: Vec<[usize; 2]>,
}

fn sides() -> impl Strategy<Value = Side> {
    vec((1..=3_usize, any::<[u8; 2]>()), 1..=3).prop_map(|axes| {
        let mut ranks = 1;
        let size = |axis: &(usize, [u8; 2])| {
            let size = if ranks * axis.0 <= 6 { axis.0 } else { 1 };
            ranks *= size;
            size
        };
        let sizes = axes.iter().map(size).collect();
        Side { sizes, placements: axes.iter().map(|axis| axis.1.map(usize::from)).collect() }
    })
}

impl Side {
    /// The placements of a tensor on this mesh: never a pending sum, unless `with_sums`.
    fn placements(&self, tensor: usize, dims: usize, with_sums: bool) -> Vec<Placement> {
        let placement = |numbers: &[usize; 2]| match numbers[tensor] % (dims + 1 + usize::from(with_sums)) {
            0 => Replicate,
            dim if dim <= dims => Shard(dim - 1),
            _ => Partial,
        };
        self.placements.iter().map(placement).collect()
    }

    fn run<T: Send>(&self, run: impl Fn(&Arc<MeshGroups>) -> Outcome<T> + Sync) -> Vec<T> {
        let axes = ["a", "b", "c"].into_iter().zip(self.sizes.iter().map(|size| *size as i64));
        let mesh = DeviceMesh::new(&axes.collect::<Vec<_>>(), None).unwrap();
        launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
            run(&Arc::new(MeshGroups::new(&mesh, rank.group.clone())?))
        })
        .unwrap_or_else(|error| panic!("{self:?}: {:#}", anyhow::Error::from(error)))
    }
}

fn four() -> Side {
    Side { sizes: vec![2, 2], placements: vec![[0; 2]; 2] }
}

fn whole(shape: &[usize], dtype: DType) -> Tensor {
    let numbers: Vec<f64> = (1..=shape.iter().product()).map(|position: usize| position as f64).collect();
    from_slice(&numbers, &Device::Cpu).unwrap().reshape(shape).unwrap().to_dtype(dtype).unwrap()
}

fn assert_same(got: &ShardedTensor, expected: &Tensor) {
    let got = got.full_tensor().unwrap();
    assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()));
    let values = |tensor: &Tensor| to_vec::<f64>(&tensor.to_dtype(DType::F64).unwrap()).unwrap();
    assert_eq!(values(&got), values(expected));
}

#[test]
fn tensors_load_in_any_placements_on_any_mesh() {
    let cases = (vec(0..6_usize, 0..=3), sides(), sides());
    let settings = Settings { cases: 24, failure_persistence: None, ..Settings::default() };
    let run = |(shape, saving, loading): (Vec<usize>, Side, Side)| {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("tensors");
        let expected = [("a.weight", whole(&shape, DType::BF16)), ("b", whole(&[7, 3], DType::I64))];
        saving.run(|groups| {
            let sharded = expected.iter().enumerate().map(|(index, (name, whole))| {
                let placements = saving.placements(index, whole.dims().len(), false);
                let tensor = ShardedTensor::distribute(groups, whole, &placements);
                Ok(((*name).to_owned(), tensor.map_err(CheckpointError::of_tensor(name))?))
            });
            save_tensors(groups, &dir, &sharded.collect::<Outcome<_>>()?, &LocalStorage)
        });
        // What is saved has every element once.
        let files = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
        let tensors = files.filter(|path| path.extension().is_some_and(|kind| kind == "safetensors"));
        let bytes = tensors.map(|path| {
            let file = fs::read(path).unwrap();
            let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
            tensors.iter().map(|(_, tensor)| tensor.data().len()).sum::<usize>()
        });
        let elems = shape.iter().product::<usize>();
        assert_eq!(bytes.sum::<usize>(), 2 * elems + 8 * 21);
        loading.run(|groups| {
            let choose = |name: &str, shape: &[usize]| {
                let index = expected.iter().position(|(known, _)| *known == name)?;
                Some(loading.placements(index, shape.len(), true))
            };
            let loaded = load_tensors(groups, &dir, choose)?;
            assert_eq!(loaded.len(), 2);
            for (name, whole) in &expected {
                assert_eq!(Some(loaded[*name].placements()), choose(name, whole.dims()));
                assert_same(&loaded[*name], whole);
            }
            assert!(load_tensors(groups, &dir, |_, _| None)?.is_empty());
            Ok(())
        });
        Ok(())
    };
    // All three dimensions are divided, on one mesh or the other.
    let rows_and_columns = Side { sizes: vec![2, 2], placements: vec![[2, 0], [1, 0]] };
    let last = Side { sizes: vec![2], placements: vec![[3, 0]] };
    run((vec![4, 2, 2], last, rows_and_columns)).unwrap();
    TestRunner::new(settings).run(&cases, run).unwrap();
}

fn save_replicated(side: &Side, dir: &Path, tensors: &[(&str, Tensor)]) {
    side.run(|groups| {
        let replicated = tensors.iter().map(|(name, whole)| {
            let tensor = ShardedTensor::distribute(groups, whole, &vec![Replicate; side.sizes.len()]);
            Ok(((*name).to_owned(), tensor.map_err(CheckpointError::of_tensor(name))?))
        });
        save_tensors(groups, dir, &replicated.collect::<Outcome<_>>()?, &LocalStorage)
    });
}

fn three() -> [(&'static str, Tensor); 3] {
    [("a", 3), ("b", 5), ("c", 4)].map(|(name, len)| (name, whole(&[len], DType::F32)))
}

#[test]
fn ranks_with_the_same_slices_share_them_by_bytes() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("tensors");
    let two = Side { sizes: vec![2], placements: vec![[0; 2]] };
    save_replicated(&two, &dir, &three());
    let names = [0, 1].map(|rank| {
        let file = fs::read(dir.join(file_name(rank, 2))).unwrap();
        let mut names = safetensors::SafeTensors::deserialize(&file)
            .unwrap()
            .names()
            .into_iter()
            .map(String::from)
            .collect::<Vec<_>>();
        names.sort();
        names
    });
    assert_eq!(names, [vec!["b"], vec!["a", "c"]]);
}

#[test]
fn version_1_has_all_slices_at_their_first_ranks() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("tensors");
    let [one, two] = [1, 2].map(|ranks| Side { sizes: vec![ranks], placements: vec![[0; 2]] });
    save_replicated(&one, &dir, &three());
    // As two ranks of the earlier version saved it.
    fs::rename(dir.join(file_name(0, 1)), dir.join(file_name(0, 2))).unwrap();
    let text = fs::read_to_string(dir.join(TABLE)).unwrap();
    let mut table: serde_json::Value = serde_json::from_str(&text).unwrap();
    table.as_object_mut().unwrap().remove("blake3");
    (table["format_version"], table["mesh"][0][1]) = (1.into(), 2.into());
    table["files"].as_array_mut().unwrap().push(serde_json::Value::Null);
    let text = serde_json::to_string_pretty(&table).unwrap();
    fs::write(dir.join(TABLE), crate::checkpoint::manifest::with_own_hash(&text)).unwrap();
    two.run(|groups| {
        let loaded = load_tensors(groups, &dir, |_, _| Some(vec![Shard(0)]))?;
        three().iter().for_each(|(name, whole)| assert_same(&loaded[*name], whole));
        Ok(())
    });
}

/// Bytes that this thread has read by now.
#[cfg(target_os = "linux")]
fn bytes_read() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/io").unwrap();
    text.strip_prefix("rchar: ").unwrap().lines().next().unwrap().parse().unwrap()
}

/// Tensors of a model directory are named as in its files.
#[test]
#[cfg(target_os = "linux")]
fn each_rank_reads_only_its_slices_of_a_safetensors_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let name = "model.language_model.embed_tokens.weight";
    let whole = whole(&[300, 501], DType::F32);
    let tensors = [(name, whole.clone()), ("other", zeros((1 << 20,), DType::U8, &Device::Cpu).unwrap())];
    candle_core::safetensors::save(&tensors.into_iter().collect(), &path).unwrap();
    let bytes = four().run(|groups| {
        let mut read = Vec::new();
        for path in [&path, dir.path()] {
            let choose = |found: &str, _: &[usize]| (found == name).then(|| vec![Shard(0), Shard(1)]);
            let before = bytes_read();
            let loaded = load_tensors(groups, path, choose)?;
            read.push(bytes_read() - before);
            assert_same(&loaded[name], &whole);
            assert_eq!(
                loaded[name].local().dims(),
                [150, if groups.world().rank() % 2 == 0 { 251 } else { 250 }]
            );
        }
        Ok(read)
    });
    for read in bytes.into_iter().flatten() {
        assert!((150 * 250 * 4..150 * 251 * 4 + 2000).contains(&read), "{read} bytes");
    }
}

#[test]
fn what_cannot_be_saved_or_loaded_is_named_on_all_ranks() {
    let parent = tempfile::tempdir().unwrap();
    let (dir, whole) = (parent.path().join("tensors"), whole(&[4, 3], DType::F32));
    four().run(|groups| {
        let save = |name: &str, placements: [Placement; 2]| {
            let tensor = ShardedTensor::distribute(groups, &whole, &placements);
            let tensor = tensor.map_err(CheckpointError::of_tensor(name))?;
            save_tensors(groups, &dir, &[(name.to_owned(), tensor)].into(), &LocalStorage)
        };
        let load = |placements: [Placement; 2]| load_tensors(groups, &dir, |_, _| Some(placements.to_vec()));
        let message = |error: CheckpointError| error.to_string();
        assert_eq!(
            save("sum", [Partial, Shard(0)]).map_err(message).unwrap_err(),
            "rank 0: tensor sum: `save_tensors(groups, …)` has no rule for Partial along axis `a`; it works with \
             `a.redistribute(&[Replicate, Shard(0)])?`"
        );
        let own = format!("of {}", groups.world().rank() / 2);
        let differs = save(&own, [Replicate; 2]).map_err(message).unwrap_err();
        assert!(differs.starts_with("rank 2: its tensors have other names"), "{differs}");
        assert!(!dir.exists());
        save("w", [Shard(0), Replicate])?;
        let exists = save("w", [Shard(0), Replicate]).map_err(message).unwrap_err();
        assert!(exists.starts_with("rank 0: cannot create ") && exists.contains("exists"), "{exists}");
        let dimension = load([Shard(2), Replicate]).map(|_| ()).map_err(message).unwrap_err();
        assert_eq!(dimension, "rank 0: tensor w: axis `a` shards dimension 2, but the shape [4, 3] has 2 dimensions");
        // A damaged file is an error on all ranks, whoever verifies or needs it.
        if groups.world().rank() == 0 {
            let path = dir.join("tensors.00002-of-00004.safetensors");
            let mut bytes = fs::read(&path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(path, bytes).unwrap();
        }
        groups.world().start_barrier()?.wait()?;
        let damaged = load([Replicate; 2]).map(|_| ()).map_err(message).unwrap_err();
        assert!(damaged.contains("00002-of-00004.safetensors: file is damaged"), "{damaged}");
        Ok(())
    });
}

/// A disk on which an operation fails: a write, an fsync, or the rename.
#[derive(Debug)]
struct FailingDisk(&'static str);

struct FailingFile(Box<dyn StorageFile>, &'static str);

fn fail(at: &str, operation: &str) -> io::Result<()> {
    if at == operation { Err(io::Error::other(format!("no {operation}"))) } else { Ok(()) }
}

impl Storage for FailingDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        LocalStorage.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        Ok(Box::new(FailingFile(LocalStorage.create(path)?, self.0)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fail(self.0, "rename")?;
        LocalStorage.rename(from, to)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        LocalStorage.sync_dir(path)
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        LocalStorage.remove_dir_all(path)
    }
}

impl Write for FailingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        fail(self.1, "write")?;
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl StorageFile for FailingFile {
    fn sync(&mut self) -> io::Result<()> {
        fail(self.1, "fsync")?;
        self.0.sync()
    }
}

#[test]
fn a_failed_save_leaves_nothing_and_can_be_repeated() {
    let parent = tempfile::tempdir().unwrap();
    let (dir, whole) = (parent.path().join("tensors"), whole(&[5], DType::F32));
    four().run(|groups| {
        let tensor = ShardedTensor::distribute(groups, &whole, &[Shard(0), Replicate]);
        let tensors = [("w".to_owned(), tensor.map_err(CheckpointError::of_tensor("w"))?)].into();
        for operation in ["write", "fsync", "rename"] {
            // One rank's disk fails: the second writer's, or that of the first rank, which publishes.
            let is_bad = groups.world().rank() == if operation == "rename" { 0 } else { 2 };
            let disk = FailingDisk(if is_bad { operation } else { "nothing" });
            let error = save_tensors(groups, &dir, &tensors, &disk).unwrap_err().to_string();
            assert!(error.contains(&format!("no {operation}")), "{error}");
            groups.world().start_barrier()?.wait()?;
            assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
            groups.world().start_barrier()?.wait()?;
        }
        save_tensors(groups, &dir, &tensors, &LocalStorage)?;
        assert_same(&load_tensors(groups, &dir, |_, _| Some(vec![Replicate; 2]))?["w"], &whole);
        Ok(())
    });
}
