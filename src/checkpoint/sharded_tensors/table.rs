//! [`TensorTable`], the file `tensors.json`: dtype, shape and placements of saved tensors, and the hashes of their files.

use crate::checkpoint::CheckpointError;
use crate::checkpoint::header::Header;
use crate::checkpoint::manifest::{check_own_hash, read_text, with_own_hash};
use crate::checkpoint::state_file::{StateFile, WrittenFile};
use crate::mesh::{DeviceMesh, MAX_RANKS};
use crate::model::TensorFile;
use crate::placement::{Layout, LayoutAxis, Placement, PlacementError, ShardedTensor};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the table within a directory of tensors.
pub(super) const TABLE: &str = "tensors.json";

/// In version 1, the first rank that has a slice writes it.
const FORMAT_VERSION: u64 = 2;

/// The tensors of a directory, with their layouts. The slices of every rank follow from the placements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TensorTable {
    format_version: u64,
    /// The axes of the mesh, with their sizes.
    mesh: Vec<(String, usize)>,
    tensors: BTreeMap<String, TensorEntry>,
    /// The files of the ranks of the mesh in row-major order. A rank without elements has none.
    pub(super) files: Vec<Option<WrittenFile>>,
    /// The ranks that write slices of each tensor, in row-major order: one of those that have it.
    #[serde(skip)]
    writers: BTreeMap<String, Vec<usize>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct TensorEntry {
    dtype: Dtype,
    shape: Vec<usize>,
    placements: Vec<String>,
}

impl TensorTable {
    /// The table of tensors on a mesh, without files.
    pub(super) fn new(
        mesh: &DeviceMesh,
        tensors: &BTreeMap<String, ShardedTensor>,
    ) -> Result<Self, CheckpointError> {
        let entry = |(name, tensor): (&String, &ShardedTensor)| {
            let checked = refuse_other_meshes(mesh, tensor).and_then(|()| refuse_sums(tensor));
            checked.map_err(CheckpointError::of_tensor(name))?;
            let placements = tensor.placements().iter().map(Placement::to_string).collect();
            let (dtype, shape) = (tensor.dtype().into(), tensor.shape().to_vec());
            Ok((name.clone(), TensorEntry { dtype, shape, placements }))
        };
        let tensors = tensors.iter().map(entry).collect::<Result<_, CheckpointError>>()?;
        let mesh = mesh.axes().iter().map(|axis| (axis.name.clone(), axis.size)).collect();
        let (files, writers) = Default::default();
        let table = Self { format_version: FORMAT_VERSION, mesh, tensors, files, writers };
        table.with_writers().map_err(CheckpointError::of_tensor(TABLE))
    }

    /// Reads and checks the table of a directory, but not its files.
    pub(super) fn read(dir: &Path) -> Result<Self, CheckpointError> {
        #[derive(Deserialize)]
        struct Version {
            format_version: u64,
        }
        let path = dir.join(TABLE);
        let invalid = |reason: String| CheckpointError::Manifest { path: path.clone(), reason };
        let foreign = |error: serde_json::Error| invalid(format!("not a table of tensors: {error}"));
        let text = read_text(&path)?;
        // Checked first: a newer format may change everything else.
        let Version { format_version: found } = serde_json::from_str(&text).map_err(foreign)?;
        if found > FORMAT_VERSION {
            return Err(CheckpointError::NewerFormat { path, found, supported: FORMAT_VERSION });
        }
        check_own_hash(&text).map_err(invalid)?;
        let table: Self = serde_json::from_str(&text).map_err(foreign)?;
        let ranks = table.mesh.iter().try_fold(1_usize, |ranks, (_, size)| ranks.checked_mul(*size));
        let is_possible = ranks.is_some_and(|ranks| ranks <= MAX_RANKS && table.files.len() == ranks);
        if !is_possible {
            let (mesh, files) = (&table.mesh, table.files.len());
            return Err(invalid(format!("the mesh {mesh:?} does not match {files} files")));
        }
        for (name, entry) in &table.tensors {
            let elems = entry.shape.iter().try_fold(16_usize, |bytes, len| bytes.checked_mul((*len).max(1)));
            elems.ok_or_else(|| invalid(format!("tensor {name}: too many elements: {:?}", entry.shape)))?;
            table.layout(entry).map_err(|error| invalid(format!("tensor {name}: {error}")))?;
        }
        table.with_writers().map_err(|error| invalid(error.to_string()))
    }

    /// The text of the file, whose last line is the hash of the others.
    pub(super) fn to_text(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|text| with_own_hash(&text))
    }

    /// Decides who writes each slice: the rank with the fewest bytes so far among those that have it, and the first of several.
    /// Tensors with large slices come first. Tables alike give writers alike.
    fn with_writers(mut self) -> Result<Self, PlacementError> {
        let mut tensors = Vec::new();
        for (name, dtype, layout) in self.tensors()? {
            let mut slices: BTreeMap<Vec<usize>, (u64, Vec<usize>)> = BTreeMap::new();
            for (rank, coordinate) in layout.coordinates().enumerate() {
                // The product in bits may not fit.
                let bytes = (layout.local_numel(&coordinate)? as u128 * dtype.bitsize() as u128 / 8) as u64;
                let axes = layout.axes().iter().zip(&coordinate);
                let is_replica = |axis: &LayoutAxis| axis.placement == Placement::Replicate;
                let slice = axes.map(|(axis, index)| if is_replica(axis) { 0 } else { *index }).collect();
                slices.entry(slice).or_insert((bytes, Vec::new())).1.push(rank);
            }
            let slices: Vec<_> = slices.into_values().filter(|(bytes, _)| *bytes > 0).collect();
            tensors.push((name.to_owned(), slices));
        }
        tensors.sort_by_key(|(_, slices)| Reverse(slices.iter().map(|(bytes, _)| *bytes).max()));
        let mut written = vec![0; self.mesh.iter().map(|(_, size)| size).product()];
        for (name, slices) in tensors {
            let mut writers = Vec::with_capacity(slices.len());
            for (bytes, holders) in slices {
                let first = holders[0];
                let least = holders.into_iter().min_by_key(|rank| written[*rank]).unwrap_or(first);
                let writer = if self.format_version == 1 { first } else { least };
                written[writer] += bytes;
                writers.push(writer);
            }
            writers.sort_unstable();
            self.writers.insert(name, writers);
        }
        Ok(self)
    }

    /// The ranks that write slices of a tensor, in row-major order.
    pub(super) fn writers(&self, name: &str) -> &[usize] {
        self.writers.get(name).map_or(&[], Vec::as_slice)
    }

    /// Every tensor: its name, dtype and layout.
    pub(super) fn tensors(&self) -> Result<Vec<(&str, Dtype, Layout)>, PlacementError> {
        let tensors = self.tensors.iter();
        tensors.map(|(name, entry)| Ok((name.as_str(), entry.dtype, self.layout(entry)?))).collect()
    }

    fn layout(&self, entry: &TensorEntry) -> Result<Layout, PlacementError> {
        let placements = entry.placements.iter().map(|text| text.parse());
        let placements = placements.collect::<Result<Vec<Placement>, PlacementError>>()?;
        if placements.len() != self.mesh.len() {
            let mesh = format!("{:?}", self.mesh);
            return Err(PlacementError::Placements { mesh, placements });
        }
        let axes = self.mesh.iter().zip(placements);
        Layout::new(
            &*entry.shape,
            axes.map(|((name, size), placement)| LayoutAxis::new(name, *size, placement)),
        )
    }

    /// The header of a rank's file.
    pub(super) fn header(&self, rank: usize) -> Result<Header, PlacementError> {
        let (mut rest, mut coordinate) = (rank, vec![0; self.mesh.len()]);
        for (index, (_, size)) in coordinate.iter_mut().zip(&self.mesh).rev() {
            (*index, rest) = (rest % size, rest / size);
        }
        let mut header = Header::new([("format", "pt".to_owned())]);
        for (name, dtype, layout) in self.tensors()? {
            if self.writers(name).contains(&rank) {
                header.push(name, dtype, layout.local_shape(&coordinate)?);
            }
        }
        Ok(header)
    }

    /// Verifies size, header and hash of a rank's file.
    pub(super) fn verify(&self, dir: &Path, rank: usize) -> Result<(), CheckpointError> {
        let Some((mut file, entry)) = self.checked(dir, rank)? else { return Ok(()) };
        file.verify(entry.bytes, &entry.blake3)
    }

    /// Opens a rank's file, after checks of its size and header.
    pub(super) fn open(&self, dir: &Path, rank: usize) -> Result<TensorFile, CheckpointError> {
        self.checked(dir, rank)?;
        Ok(TensorFile::open(dir.join(file_name(rank, self.files.len())))?)
    }

    fn checked(&self, dir: &Path, rank: usize) -> Result<Option<(StateFile, &WrittenFile)>, CheckpointError> {
        let expected = self.header(rank).map_err(CheckpointError::of_tensor(TABLE))?;
        match &self.files[rank] {
            Some(entry) => {
                let path = dir.join(file_name(rank, self.files.len()));
                Ok(Some((StateFile::open_as(path, entry.bytes, &expected)?, entry)))
            }
            None if expected.data_bytes() == 0 => Ok(None),
            None => {
                let reason = format!("rank {rank} has elements, but no file");
                Err(CheckpointError::Manifest { path: dir.join(TABLE), reason })
            }
        }
    }
}

/// The name of the file of one of `ranks` ranks.
pub(super) fn file_name(rank: usize, ranks: usize) -> String {
    format!("tensors.{rank:05}-of-{ranks:05}.safetensors")
}

fn refuse_other_meshes(mesh: &DeviceMesh, tensor: &ShardedTensor) -> Result<(), PlacementError> {
    let own = tensor.groups().mesh();
    if own == mesh {
        return Ok(());
    }
    let (first, second) = (mesh.to_string(), own.to_string());
    Err(PlacementError::Meshes { call: "save_tensors(groups, …)", first, second })
}

/// A sum that is pending has no elements yet.
fn refuse_sums(tensor: &ShardedTensor) -> Result<(), PlacementError> {
    let axes = tensor.layout().axes();
    let Some(axis) = axes.iter().find(|axis| axis.placement == Placement::Partial) else { return Ok(()) };
    let summed = |placement: Placement| match placement {
        Placement::Partial => Placement::Replicate,
        other => other,
    };
    Err(PlacementError::NoRule {
        call: "save_tensors(groups, …)",
        axis: axis.name.clone(),
        placements: vec![Placement::Partial],
        valid: vec![Some(tensor.placements().into_iter().map(summed).collect())],
    })
}
