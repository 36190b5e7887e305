//! Headers of safetensors files: expected and actual.

use super::CheckpointError;
use crate::safetensors_file::{self, HeaderError};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::{Read, Seek};
use std::ops::Range;
use std::path::Path;

/// Key of the metadata strings.
const METADATA: &str = "__metadata__";

/// A header: the tensors in file order, and the metadata strings.
#[derive(Debug, Clone, Default)]
pub(super) struct Header {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, TensorInfo)>,
}

impl Header {
    /// Creates a header without tensors.
    pub(super) fn new<const N: usize>(metadata: [(&str, String); N]) -> Self {
        let metadata = metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        Self { metadata, tensors: Vec::new() }
    }

    /// Appends a tensor after the existing ones.
    pub(super) fn push(&mut self, name: impl Into<String>, dtype: Dtype, shape: Vec<usize>) {
        let start = self.data_bytes();
        let end = start + shape.iter().product::<usize>() * dtype.bitsize() / 8;
        self.tensors.push((name.into(), TensorInfo { dtype, shape, data_offsets: (start, end) }));
    }

    /// Returns the total bytes of the tensors.
    pub(super) fn data_bytes(&self) -> usize {
        self.tensors.last().map_or(0, |(_, info)| info.data_offsets.1)
    }

    /// Returns the byte range of a tensor within the data.
    pub(super) fn tensor(&self, name: &str) -> Option<Range<usize>> {
        let (_, info) = self.tensors.iter().find(|(known, _)| known == name)?;
        Some(info.data_offsets.0..info.data_offsets.1)
    }

    /// Encodes the header: its length, then JSON, padded to align the data.
    pub(super) fn to_bytes(&self) -> serde_json::Result<Vec<u8>> {
        let mut object = Map::new();
        if !self.metadata.is_empty() {
            object.insert(METADATA.into(), json!(self.metadata));
        }
        for (name, info) in &self.tensors {
            object.insert(name.clone(), serde_json::to_value(info)?);
        }
        let mut json = serde_json::to_vec(&Value::Object(object))?;
        json.resize(json.len().next_multiple_of(8), b' ');
        Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
    }

    /// Reads the header of a file of `file_bytes`. Returns it with the offset of the data.
    pub(super) fn read(
        file: &mut (impl Read + Seek),
        file_bytes: u64,
        path: &Path,
    ) -> Result<(Self, u64), CheckpointError> {
        let invalid = |reason: String| CheckpointError::Header { path: path.to_owned(), reason };
        let (json, data_start) =
            safetensors_file::read_header(file, file_bytes).map_err(|error| match error {
                HeaderError::Io(source) => CheckpointError::io("read", path)(source),
                HeaderError::Invalid(reason) => invalid(reason),
            })?;
        let header = serde_json::from_slice(&json)
            .map_err(|error| invalid(format!("not a safetensors header: {error}")))?;
        Ok((header, data_start))
    }

    /// Checks that the header equals `expected`. The error names the first different tensor.
    pub(super) fn check(&self, expected: &Self, path: &Path) -> Result<(), CheckpointError> {
        for (key, wanted) in &expected.metadata {
            let found = self.metadata.get(key).map_or("missing", String::as_str);
            if found != wanted {
                let reason = format!("its `{key}` is {found}, expected {wanted}");
                return Err(CheckpointError::Header { path: path.to_owned(), reason });
            }
        }
        let refuse = |tensor: &str, reason: String| {
            Err(CheckpointError::Tensor { path: path.to_owned(), tensor: tensor.to_owned(), reason })
        };
        let mut seen = HashSet::new();
        for (name, info) in &self.tensors {
            if !seen.insert(name) {
                return refuse(name, "listed twice".into());
            }
            let Some((_, wanted)) = expected.tensors.iter().find(|(known, _)| known == name) else {
                return refuse(name, "not in the manifest".into());
            };
            if info.dtype != wanted.dtype {
                return refuse(name, format!("dtype is {:?}, expected {:?}", info.dtype, wanted.dtype));
            }
            if info.shape != wanted.shape {
                return refuse(name, format!("shape is {:?}, expected {:?}", info.shape, wanted.shape));
            }
            if info.data_offsets != wanted.data_offsets {
                let (found, wanted) = (info.data_offsets, wanted.data_offsets);
                return refuse(name, format!("byte range is {found:?}, expected {wanted:?}"));
            }
        }
        match expected.tensors.iter().find(|(name, _)| !seen.contains(name)) {
            Some((missing, _)) => refuse(missing, "missing".into()),
            None => Ok(()),
        }
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// A visitor that keeps duplicate entries, which a map would hide.
struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut header = Header::default();
        while let Some(key) = map.next_key::<String>()? {
            if key == METADATA {
                header.metadata = map.next_value()?;
            } else {
                header.tensors.push((key, map.next_value()?));
            }
        }
        Ok(header)
    }
}
