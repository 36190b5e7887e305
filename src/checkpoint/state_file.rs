//! The safetensors files of a checkpoint: sequential writes, and reads of ranges.

use super::header::Header;
use super::manifest::{FileEntry, Manifest};
use super::stored_layouts::StoredLayouts;
use super::{CheckpointError, Storage, StorageFile};
use crate::regular_file;
use crate::safetensors_file::{CHUNK_BYTES, read_elements};
use crate::zero::{CheckpointPart, StateSlice};
use candle_core::Device;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use ulysses_kernels::tensor::{to_vec, with_slice};

/// A sequential writer of a safetensors file, which also computes its hash.
pub(super) struct TensorFileWriter {
    path: PathBuf,
    file: Box<dyn StorageFile>,
    hasher: blake3::Hasher,
    bytes: u64,
    chunk: Vec<u8>,
}

/// Size and hash of a durably written file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WrittenFile {
    pub(super) bytes: u64,
    pub(super) blake3: String,
}

impl TensorFileWriter {
    /// Creates the file and writes its header.
    pub(super) fn create(
        storage: &dyn Storage,
        path: PathBuf,
        header: &Header,
    ) -> Result<Self, CheckpointError> {
        let file = storage.create(&path).map_err(CheckpointError::io("create", &path))?;
        let mut this = Self { path, file, hasher: blake3::Hasher::new(), bytes: 0, chunk: Vec::new() };
        let header = header.to_bytes().map_err(|error| CheckpointError::Header {
            path: this.path.clone(),
            reason: format!("cannot be written: {error}"),
        })?;
        this.chunk = header;
        this.write_chunk()?;
        Ok(this)
    }

    /// Appends elements, each encoded in `N` bytes.
    pub(super) fn write<const N: usize>(
        &mut self,
        elements: &[f32],
        encode: impl Fn(f32) -> [u8; N],
    ) -> Result<(), CheckpointError> {
        for part in elements.chunks(CHUNK_BYTES / N) {
            self.chunk.resize(part.len() * N, 0);
            let (encoded, _) = self.chunk.as_chunks_mut::<N>();
            encoded.iter_mut().zip(part).for_each(|(bytes, element)| *bytes = encode(*element));
            self.write_chunk()?;
        }
        Ok(())
    }

    /// Appends bytes.
    pub(super) fn write_bytes(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.chunk.clear();
        self.chunk.extend_from_slice(bytes);
        self.write_chunk()
    }

    fn write_chunk(&mut self) -> Result<(), CheckpointError> {
        self.file.write_all(&self.chunk).map_err(CheckpointError::io("write", &self.path))?;
        self.hasher.update(&self.chunk);
        self.bytes += self.chunk.len() as u64;
        Ok(())
    }

    /// Makes the file durable (fsync) and returns its size and hash.
    pub(super) fn finish(mut self) -> Result<WrittenFile, CheckpointError> {
        self.file.sync().map_err(CheckpointError::io("fsync", &self.path))?;
        Ok(WrittenFile { bytes: self.bytes, blake3: self.hasher.finalize().to_hex().to_string() })
    }
}

/// Returns the header of the file of one kind and part.
///
/// It has one tensor per unit, under the unit's name: its elements in the partition, without padding. Units without
/// elements are omitted, as are units of other stages, frozen units in files of optimizer state, and at all ranks of tp but the first the
/// units that are not sharded.
fn expected_header(manifest: &Manifest, layouts: &StoredLayouts, kind: &str, part: CheckpointPart) -> Header {
    let CheckpointPart { partition, tp_rank, stage } = part;
    let mut name = format!("{partition} of {}", manifest.num_partitions);
    if manifest.mesh.tp > 1 {
        name += &format!(", tp rank {tp_rank} of {}", manifest.mesh.tp);
    }
    if manifest.mesh.pp > 1 {
        name += &format!(", stage {stage} of {}", manifest.mesh.pp);
    }
    let mut header = Header::new([
        ("run_id", manifest.run_id.clone()),
        ("step", manifest.progress.step.to_string()),
        ("kind", kind.to_owned()),
        ("partition", name),
    ]);
    for layout in layouts.part_layouts(part).filter(|layout| manifest.has(layout, kind)) {
        let elements = layout.unpadded(layout.partition(partition)).len();
        if elements > 0 {
            header.push(layout.name(), Dtype::F32, vec![elements]);
        }
    }
    header
}

/// Writes the file of one kind and part.
pub(super) fn write_state_file(
    storage: &dyn Storage,
    dir: &Path,
    manifest: &Manifest,
    layouts: &StoredLayouts,
    kind: &str,
    part: CheckpointPart,
    units: &[StateSlice],
) -> Result<FileEntry, CheckpointError> {
    let name = manifest.file_name(kind, part);
    let header = expected_header(manifest, layouts, kind, part);
    let mut file = TensorFileWriter::create(storage, dir.join(&name), &header)?;
    for unit in units {
        // One unit at a time, as offloaded state is read from a file.
        let unit = unit.tensor().map_err(std::io::Error::other);
        let unit = unit.map_err(CheckpointError::io("write", &dir.join(&name)))?;
        let mut write = |elements: &[f32]| file.write(elements, f32::to_le_bytes);
        let written = match unit.device() {
            // No copy.
            Device::Cpu => with_slice(&unit, write),
            _ => to_vec(&unit).map(|elements| write(&elements)),
        };
        written.map_err(std::io::Error::other).map_err(CheckpointError::io("write", &dir.join(&name)))??;
    }
    let WrittenFile { bytes, blake3 } = file.finish()?;
    let CheckpointPart { partition, tp_rank, stage } = part;
    Ok(FileEntry { name, kind: kind.to_owned(), partition, tp_rank, stage, bytes, blake3 })
}

/// An open file whose header matches the manifest.
#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
    file: File,
    header: Header,
    data_start: u64,
}

impl StateFile {
    /// Opens a file, and checks its size and header but not its hash.
    pub(super) fn open(
        dir: &Path,
        manifest: &Manifest,
        layouts: &StoredLayouts,
        entry: &FileEntry,
    ) -> Result<Self, CheckpointError> {
        let header = expected_header(manifest, layouts, &entry.kind, entry.part());
        Self::open_as(dir.join(&entry.name), entry.bytes, &header)
    }

    /// Opens a file that has this size and header.
    pub(super) fn open_as(path: PathBuf, bytes: u64, expected: &Header) -> Result<Self, CheckpointError> {
        let (mut file, found) = regular_file::open(&path).map_err(CheckpointError::io("open", &path))?;
        if found != bytes {
            return Err(CheckpointError::FileSize { path, expected: bytes, found });
        }
        let (header, data_start) = Header::read(&mut file, found, &path)?;
        header.check(expected, &path)?;
        let expected = data_start + header.data_bytes() as u64;
        if found != expected {
            return Err(CheckpointError::FileSize { path, expected, found });
        }
        Ok(Self { path, file, header, data_start })
    }

    /// Reads the whole file and checks its hash.
    pub(super) fn verify(&mut self, bytes: u64, blake3: &str) -> Result<(), CheckpointError> {
        let found = hash_file(&mut self.file, bytes).map_err(CheckpointError::io("read", &self.path))?;
        if found == blake3 {
            return Ok(());
        }
        Err(CheckpointError::FileHash { path: self.path.clone(), expected: blake3.to_owned(), found })
    }

    /// Reads only elements `range` of a unit's tensor.
    pub(super) fn read(
        &mut self,
        unit: &str,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        const SIZE: usize = size_of::<f32>();
        let Some(tensor) = self.header.tensor(unit).filter(|bytes| range.end * SIZE <= bytes.len()) else {
            let reason = format!("elements {range:?} are missing");
            return Err(CheckpointError::Tensor { path: self.path.clone(), tensor: unit.to_owned(), reason });
        };
        let start = self.data_start + (tensor.start + range.start * SIZE) as u64;
        let read_at = |position, bytes: &mut [u8]| {
            self.file.seek(SeekFrom::Start(position)).and_then(|_| self.file.read_exact(bytes))
        };
        read_elements(start, out, f32::from_le_bytes, read_at)
            .map_err(CheckpointError::io("read", &self.path))
    }
}

/// Hashes the first `bytes` of a file, which may be growing.
fn hash_file(file: &mut File, bytes: u64) -> std::io::Result<String> {
    file.seek(SeekFrom::Start(0))?;
    let mut file = file.take(bytes);
    let mut hasher = blake3::Hasher::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hasher.finalize().to_hex().to_string()),
            length => hasher.update(&chunk[..length]),
        };
    }
}
