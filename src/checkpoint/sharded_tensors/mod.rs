//! Saves tensors by the slices that ranks have of them, and loads them in other placements on any mesh.
//!
//! `table.rs` has the file that describes them, `stored.rs` the reads of slices.

mod stored;
mod table;
#[cfg(test)]
mod tests;

use super::save::{all_or_refused, gather_results};
use super::state_file::{TensorFileWriter, WrittenFile};
use super::{CheckpointError, Storage};
use crate::comm::{MeshGroups, ProcessGroup};
use crate::placement::{Layout, Placement, PlacementError, ShardedTensor};
use crate::safetensors_file::CHUNK_BYTES;
use candle_core::{Device, Tensor};
use safetensors::View;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use stored::StoredTensors;
use table::{TABLE, TensorTable, file_name};

/// Saves tensors to the new directory `dir`, as torch's `distributed.checkpoint.save`. Collective over the mesh.
///
/// Each rank writes a safetensors file with slices that it has, and the first rank of the mesh `tensors.json`, with the hashes of
/// all files. Ranks that have the same slices share them by bytes (PyTorch DCP's `dedup_save_to_lowest_rank=False`). The
/// directory appears atomically: it is complete, or not there. [`load_tensors`] reads it.
///
/// # Errors
/// A directory that exists, ranks with different names, dtypes, shapes or placements, a tensor on another mesh, a pending
/// sum, or a failed write. All ranks fail, and name the first that did.
pub fn save_tensors(
    groups: &MeshGroups,
    dir: &Path,
    tensors: &BTreeMap<String, ShardedTensor>,
    storage: &dyn Storage,
) -> Result<(), CheckpointError> {
    let place = Place::new(groups)?;
    let table = TensorTable::new(groups.mesh(), tensors);
    let hash = |table: &TensorTable| Ok(blake3::hash(table.to_text()?.as_bytes()).to_hex().to_string());
    let own = table
        .as_ref()
        .map_err(ToString::to_string)
        .and_then(|table| hash(table).map_err(|error: serde_json::Error| error.to_string()));
    let hashes = place.agree(own)?;
    if let Some(rank) = hashes.iter().position(|other| *other != hashes[0]) {
        let reason =
            "its tensors have other names, dtypes, shapes or placements than those of rank 0".to_owned();
        return Err(CheckpointError::Refused { rank, reason });
    }
    let mut table = table?;
    let unfinished = dir.with_file_name(format!(".{}.saving", dir.file_name().unwrap_or_default().display()));
    let begun = if place.rank == 0 { begin(dir, &unfinished, storage) } else { Ok(()) };
    place.agree(begun.map_err(|error| error.to_string()))?;
    let written = write_file(&place, &unfinished, &table, tensors, storage);
    let published = place.agree(written.map_err(|error| error.to_string())).and_then(|files| {
        table.files = files;
        let published = if place.rank == 0 { publish(dir, &unfinished, &table, storage) } else { Ok(()) };
        place.agree(published.map_err(|error| error.to_string()))
    });
    if published.is_err() && place.rank == 0 {
        let _ = storage.remove_dir_all(&unfinished);
    }
    published.map(|_| ())
}

/// Loads tensors in any placements on any mesh, as torch's `distributed.checkpoint.load`. Collective over the mesh.
///
/// `path` is a directory of [`save_tensors`], a model directory of Hugging Face, or a safetensors file. `placements` gets
/// the name and shape of every tensor there, and returns its placements, or `None` to leave it out. It returns the same on
/// all ranks. Each rank reads its own slices only. In a directory of `save_tensors`, the ranks also verify the hashes
/// of the files, which they share.
///
/// Along an axis with a `Partial` placement, the first rank has the elements and the others have zeros. The tensors are on
/// the device of `groups`.
///
/// # Errors
/// A file that is missing, damaged or too new, a dtype that the library does not have, or placements that do not fit. All
/// ranks fail, and name the first that did.
pub fn load_tensors(
    groups: &Arc<MeshGroups>,
    path: &Path,
    placements: impl Fn(&str, &[usize]) -> Option<Vec<Placement>>,
) -> Result<BTreeMap<String, ShardedTensor>, CheckpointError> {
    let place = Place::new(groups)?;
    let load = || -> Result<_, CheckpointError> {
        let mut stored = StoredTensors::open(path, place.rank, place.ranks)?;
        let mut tensors = BTreeMap::new();
        let shapes: Vec<_> =
            stored.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape().to_vec())).collect();
        for (name, shape) in shapes {
            let Some(placements) = placements(&name, &shape) else { continue };
            let in_tensor = CheckpointError::of_tensor::<PlacementError>;
            let layout = Layout::on_mesh(&*shape, groups.mesh(), &placements).map_err(in_tensor(&name))?;
            let local = stored.read(&name, &layout, &place.coordinate, groups.device())?;
            let tensor = ShardedTensor::from_local(groups, &local, &placements, Some(&shape));
            tensors.insert(name.clone(), tensor.map_err(in_tensor(&name))?);
        }
        Ok(tensors)
    };
    let tensors = load();
    place.agree(tensors.as_ref().map(|_| ()).map_err(ToString::to_string))?;
    tensors
}

/// A rank's place in a mesh.
struct Place {
    /// This rank's group along every axis.
    along: Vec<Arc<dyn ProcessGroup>>,
    coordinate: Vec<usize>,
    /// Index in row-major order.
    rank: usize,
    ranks: usize,
}

impl Place {
    fn new(groups: &MeshGroups) -> Result<Self, CheckpointError> {
        let along = groups.get_all_groups()?;
        let coordinate = along.iter().map(|group| group.rank()).collect();
        let rank = along.iter().fold(0, |rank, group| rank * group.world_size() + group.rank());
        let ranks = along.iter().map(|group| group.world_size()).product();
        Ok(Self { along, coordinate, rank, ranks })
    }

    /// The values of all ranks in row-major order, or the first failure.
    fn agree<T: Serialize + DeserializeOwned>(
        &self,
        own: Result<T, String>,
    ) -> Result<Vec<T>, CheckpointError> {
        let mut all = vec![own];
        // The last axis is the fastest.
        for group in self.along.iter().rev() {
            let gathered = gather_results(&**group, &Ok(all))?;
            all = gathered
                .into_iter()
                .flat_map(|part| part.unwrap_or_else(|reason| vec![Err(reason)]))
                .collect();
        }
        all_or_refused(all)
    }
}

/// Creates the hidden directory that is renamed when it is complete.
fn begin(dir: &Path, unfinished: &Path, storage: &dyn Storage) -> Result<(), CheckpointError> {
    if dir.symlink_metadata().is_ok() {
        let exists = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
        return Err(CheckpointError::io("create", dir)(exists));
    }
    // What a killed save left.
    let _ = storage.remove_dir_all(unfinished);
    storage.create_dir(unfinished).map_err(CheckpointError::io("create", unfinished))
}

/// Writes this rank's file, if it has elements to write.
fn write_file(
    place: &Place,
    dir: &Path,
    table: &TensorTable,
    tensors: &BTreeMap<String, ShardedTensor>,
    storage: &dyn Storage,
) -> Result<Option<WrittenFile>, CheckpointError> {
    let path = dir.join(file_name(place.rank, place.ranks));
    let refused =
        |error: &dyn ToString| CheckpointError::io("write", &path)(std::io::Error::other(error.to_string()));
    let header = table.header(place.rank).map_err(|error| refused(&error))?;
    if header.data_bytes() == 0 {
        return Ok(None);
    }
    let mut file = TensorFileWriter::create(storage, path.clone(), &header)?;
    for (_, tensor) in tensors.iter().filter(|(name, _)| header.tensor(name).is_some()) {
        for part in parts(tensor.local()).map_err(|error| refused(&error))? {
            let part = part.and_then(|part| part.to_device(&Device::Cpu)).map_err(|error| refused(&error))?;
            file.write_bytes(&part.data())?;
        }
    }
    file.finish().map(Some)
}

/// A tensor in parts of at most [`CHUNK_BYTES`].
fn parts(local: &Tensor) -> candle_core::Result<impl Iterator<Item = candle_core::Result<Tensor>>> {
    let (flat, step) = (local.flatten_all()?, CHUNK_BYTES / local.dtype().size_in_bytes());
    let numel = flat.elem_count();
    Ok((0..numel).step_by(step).map(move |start| flat.narrow(0, start, step.min(numel - start))))
}

/// Writes the table, and gives the directory its name.
fn publish(
    dir: &Path,
    unfinished: &Path,
    table: &TensorTable,
    storage: &dyn Storage,
) -> Result<(), CheckpointError> {
    let path = unfinished.join(TABLE);
    let text = table.to_text().map_err(std::io::Error::from).map_err(CheckpointError::io("write", &path))?;
    let mut file = storage.create(&path).map_err(CheckpointError::io("create", &path))?;
    file.write_all(text.as_bytes()).map_err(CheckpointError::io("write", &path))?;
    file.sync().map_err(CheckpointError::io("fsync", &path))?;
    storage.sync_dir(unfinished).map_err(CheckpointError::io("fsync", unfinished))?;
    storage.rename(unfinished, dir).map_err(CheckpointError::io("rename", unfinished))?;
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    storage.sync_dir(parent).map_err(CheckpointError::io("fsync", parent))
}
