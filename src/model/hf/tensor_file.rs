//! A safetensors file that is read by ranges.

use crate::model::ModelError;
use crate::regular_file;
use crate::safetensors_file::{self, HeaderError};
use half::{bf16, f16};
use parking_lot::Mutex;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An open file. Only its header is in memory.
pub(crate) struct TensorFile {
    path: PathBuf,
    file: Mutex<File>,
    tensors: HashMap<String, TensorInfo>,
    /// File offset of the tensor data.
    data_start: u64,
}

impl TensorFile {
    /// Opens a file and reads its header, which must account for every byte.
    ///
    /// # Errors
    /// A file that is missing or is not safetensors.
    pub(crate) fn open(path: PathBuf) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { path: path.clone(), source };
        let (mut file, file_bytes) = regular_file::open(&path).map_err(io)?;
        let (metadata, data_start) = read_header(&mut file, file_bytes, &path)?;
        let tensors = metadata.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
        Ok(Self { path, file: Mutex::new(file), tensors, data_start })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all its tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(crate) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// Reads elements `range` (row-major) of a tensor as f32 into `out`, of the same length.
    ///
    /// # Errors
    /// An unsupported dtype, a range outside the tensor, or a failed read.
    pub(super) fn read(
        &self,
        name: &str,
        info: &TensorInfo,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let elements: usize = info.shape.iter().product();
        if range.end > elements || range.len() != out.len() {
            return Err(self.format(format!(
                "elements {range:?} of {name}, which has {elements}, do not match the {} requested",
                out.len()
            )));
        }
        let start = self.data_start + info.data_offsets.0 as u64;
        match info.dtype {
            Dtype::F32 => self.widen(start, range, out, f32::from_le_bytes),
            Dtype::BF16 => self.widen(start, range, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            Dtype::F16 => self.widen(start, range, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
            other => Err(self.format(format!("tensor {name} is {other:?}; f32, bf16 and f16 can be loaded"))),
        }
    }

    /// Reads bytes `range` of a tensor's elements into `out`, of the same length.
    ///
    /// # Errors
    /// A tensor or a range that the file lacks, or a failed read.
    pub(crate) fn read_bytes(
        &self,
        name: &str,
        range: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), ModelError> {
        let offsets = self.info(name).map(|info| info.data_offsets);
        let Some((start, _)) = offsets.filter(|(start, end)| range.end <= end - start) else {
            return Err(self.format(format!("bytes {range:?} of tensor {name} are missing")));
        };
        let mut file = self.file.lock();
        file.seek(SeekFrom::Start(self.data_start + (start + range.start) as u64))
            .and_then(|_| file.read_exact(out))
            .map_err(|source| ModelError::Io { path: self.path.clone(), source })
    }

    /// Passes the bytes of a tensor to `write`, part by part.
    pub(super) fn copy<E: From<ModelError>>(
        &self,
        info: &TensorInfo,
        mut write: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        const PART: usize = 1 << 20;
        let (mut start, end) =
            (self.data_start + info.data_offsets.0 as u64, self.data_start + info.data_offsets.1 as u64);
        let mut part = vec![0; PART];
        while start < end {
            let part = &mut part[..PART.min((end - start) as usize)];
            let mut file = self.file.lock();
            let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(part));
            read.map_err(|source| ModelError::Io { path: self.path.clone(), source })?;
            write(part)?;
            start += part.len() as u64;
        }
        Ok(())
    }

    /// Decodes elements `range` of the little-endian array that begins at byte `start`.
    fn widen<const N: usize>(
        &self,
        start: u64,
        range: Range<usize>,
        out: &mut [f32],
        decode: impl Fn([u8; N]) -> f32,
    ) -> Result<(), ModelError> {
        // Ranks share the file: each locks it for one chunk, and they decode in parallel.
        let read_at = |position, bytes: &mut [u8]| {
            let mut file = self.file.lock();
            file.seek(SeekFrom::Start(position)).and_then(|_| file.read_exact(bytes))
        };
        safetensors_file::read_elements(start + (range.start * N) as u64, out, decode, read_at)
            .map_err(|source| ModelError::Io { path: self.path.clone(), source })
    }

    pub(super) fn format(&self, reason: String) -> ModelError {
        ModelError::Format { path: self.path.clone(), reason }
    }
}

/// Reads the header, which is checked against the file's size before anything is allocated. Also returns the
/// offset of the data.
fn read_header(file: &mut File, file_bytes: u64, path: &Path) -> Result<(Metadata, u64), ModelError> {
    let format = |reason: String| ModelError::Format { path: path.to_owned(), reason };
    let (json, data_start) =
        safetensors_file::read_header(file, file_bytes).map_err(|error| match error {
            HeaderError::Io(source) => ModelError::Io { path: path.to_owned(), source },
            HeaderError::Invalid(reason) => format(reason),
        })?;
    let invalid = |error: &dyn std::fmt::Display| format(format!("not a safetensors header: {error}"));
    let parsed: Metadata = serde_json::from_slice(&json).map_err(|error| invalid(&error))?;
    let metadata = validated(&parsed).map_err(|error| invalid(&error))?;
    let (claimed, actual) = (metadata.data_len() as u64, file_bytes - data_start);
    if claimed != actual {
        return Err(format(format!(
            "the header describes {claimed} bytes of tensors; the file has {actual}"
        )));
    }
    Ok((metadata, data_start))
}

/// Checks the header: tensors follow each other without gaps or overlaps, and each has the bytes of its
/// shape. Deserializing alone does not check this.
fn validated(parsed: &Metadata) -> Result<Metadata, safetensors::SafeTensorError> {
    let in_order = parsed.offset_keys();
    let info = |name: String| parsed.info(&name).map(|info| (name, info.clone()));
    Metadata::new(parsed.metadata().clone(), in_order.into_iter().filter_map(info).collect())
}
