//! The kind of a data file: from its extension, then from its first bytes.

use super::binary::{ARROW, NUMPY};
use super::layout::is_sample;
use super::reader::{self, read_error};
use crate::data::DataError;
use crate::data::storage::{FileFormat, TokenFile};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::io::{BufRead, Read};
use std::path::Path;

/// So much of a `.json` file is read to tell whether it has one object per line.
const MAX_FIRST_LINE_BYTES: u64 = 64 << 20;

/// Extensions of files that are never read, and what to do.
const UNREADABLE: [(&[&str], &str); 6] = [
    (&["arrow", "feather", "ipc"], ARROW),
    (&["npy", "npz"], NUMPY),
    (
        &["zip", "tar", "tgz", "7z", "rar", "xz", "bz2", "lz4", "br", "lzma"],
        "an archive, or compressed with a program that is not supported; extract it, or use gzip or Zstandard",
    ),
    (
        &["safetensors", "gguf", "onnx", "ckpt", "pt", "pth"],
        "weights or tensors, not data; write JSONL with `text` or `input_ids`",
    ),
    (
        &[
            "avro", "db", "h5", "hdf5", "lmdb", "mdb", "msgpack", "orc", "pickle", "pkl", "sqlite",
            "sqlite3", "tfrecord", "xls", "xlsx",
        ],
        "a file of another program; write JSONL with `text` or `input_ids`",
    ),
    (&["doc", "docx", "epub", "odt", "pdf", "rtf"], "a formatted document; extract its text"),
];

/// Extensions of settings, which are text only if they are named.
const SETTINGS: [&str; 6] = ["cfg", "ini", "lock", "toml", "yaml", "yml"];

/// The kind of a source file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::data) enum SourceKind {
    /// One document of UTF-8 text.
    Text,
    /// One document per line.
    JsonLines,
    /// One document per element of an array.
    JsonArray,
    /// One document per row, with a delimiter between columns.
    Table { delimiter: u8 },
    /// One document per row.
    Parquet,
    /// A token file.
    Tokens(FileFormat),
}

impl SourceKind {
    /// Returns whether the file has samples, so that other files of its directory describe them.
    pub(super) fn has_samples(self) -> bool {
        self != Self::Text
    }
}

/// Returns the kind of a named file, or what to do instead of reading it.
pub(super) fn named_kind(path: &Path) -> Result<Result<SourceKind, &'static str>, DataError> {
    let extension = extension(path);
    if let Some(kind) = by_extension(&extension) {
        return Ok(Ok(kind));
    }
    if let Some((_, advice)) = UNREADABLE.iter().find(|(names, _)| names.contains(&extension.as_str())) {
        return Ok(Err(advice));
    }
    if extension == "json" {
        return Ok(json(path)?.map(|(kind, _)| kind).ok_or(
            "a JSON value over several lines; write one object per line, or an array of objects, as with `jq -s .`",
        ));
    }
    Ok(Ok(TokenFile::detect(path)?.map_or(SourceKind::Text, SourceKind::Tokens)))
}

/// Returns the kind of a file in a directory, `None` for one that is no data. What a name may mean counts only if the file
/// says so itself: a `.bin` by its header or the index next to it, which is read with its `.bin`; JSON and tables by the
/// fields of the first sample.
pub(super) fn found_kind(path: &Path, text_field: &str) -> Result<Option<SourceKind>, DataError> {
    match data_kind(path, text_field) {
        Err(DataError::NotText { .. }) => Ok(None),
        kind => kind,
    }
}

fn data_kind(path: &Path, text_field: &str) -> Result<Option<SourceKind>, DataError> {
    let extension = extension(path);
    let is_sample = |names: &[String]| is_sample(|name| names.iter().any(|found| found == name), text_field);
    if SETTINGS.contains(&extension.as_str()) || is_card(path)? {
        return Ok(None);
    }
    Ok(match named_kind(path)?.ok() {
        Some(SourceKind::Table { delimiter }) => {
            let header = super::table::header(path, delimiter)?;
            is_sample(&header).then_some(SourceKind::Table { delimiter })
        }
        Some(SourceKind::JsonLines | SourceKind::JsonArray) if extension == "json" => {
            json(path)?.filter(|(_, fields)| is_sample(fields)).map(|(kind, _)| kind)
        }
        Some(SourceKind::Tokens(FileFormat::Megatron)) if extension == "idx" => None,
        Some(SourceKind::Tokens(FileFormat::NanoGpt)) => None,
        kind => kind,
    })
}

/// Returns the extension in lower case, without that of a compressed file.
pub(super) fn extension(path: &Path) -> String {
    let of = |path: &Path| path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    match of(path).as_str() {
        "gz" | "zst" | "zstd" => of(Path::new(path.file_stem().unwrap_or_default())),
        extension => extension.to_owned(),
    }
}

/// Returns the kind of a file, if its extension determines it.
fn by_extension(extension: &str) -> Option<SourceKind> {
    Some(match extension {
        "jsonl" | "ndjson" => SourceKind::JsonLines,
        "parquet" => SourceKind::Parquet,
        "csv" => SourceKind::Table { delimiter: b',' },
        "tsv" => SourceKind::Table { delimiter: b'\t' },
        _ => return None,
    })
}

/// Returns whether a `.json` file has lines or is an array, with the names of the first object's texts and
/// arrays. `None`: neither.
fn json(path: &Path) -> Result<Option<(SourceKind, Vec<String>)>, DataError> {
    let failed = |source| read_error(path, source);
    let mut file = reader::open_json(path)?;
    type Object = BTreeMap<String, Box<RawValue>>;
    let (kind, first) = match reader::skip_to(&mut file, b'[').map_err(failed)? {
        Some(_) => {
            reader::skip_space(&mut file).map_err(failed)?;
            let mut first = serde_json::Deserializer::from_reader(file.take(MAX_FIRST_LINE_BYTES));
            (SourceKind::JsonArray, Object::deserialize(&mut first))
        }
        None => {
            let mut line = Vec::new();
            file.take(MAX_FIRST_LINE_BYTES).read_until(b'\n', &mut line).map_err(failed)?;
            (SourceKind::JsonLines, serde_json::from_slice(&line))
        }
    };
    let is_field = |value: &RawValue| value.get().starts_with(['"', '[']);
    let names = |object: Object| {
        object.into_iter().filter(|(_, value)| is_field(value)).map(|(name, _)| name).collect()
    };
    Ok(first.ok().map(|object| (kind, names(object))))
}

/// Returns whether a file describes a data set of the Hugging Face Hub: a `README.md` with settings at its beginning.
fn is_card(path: &Path) -> Result<bool, DataError> {
    if path.file_name().is_none_or(|name| name != "README.md") {
        return Ok(false);
    }
    let mut file = reader::open(path, 0)?;
    Ok(file.fill_buf().map_err(|source| read_error(path, source))?.starts_with(b"---"))
}
