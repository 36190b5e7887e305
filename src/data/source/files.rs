//! Resolves paths, directories and patterns to files.

use crate::data::DataError;
use crate::data::storage::{FileFormat, TokenFile};
use serde::de::IgnoredAny;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// U+FEFF in UTF-8, with which some editors begin a file.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// So much of a `.json` file is read to tell whether it has one object per line.
const MAX_FIRST_LINE_BYTES: u64 = 64 << 20;

/// Files that mark the output directory of a run: its lock, and the metrics of versions without lock. A run that reads
/// the directory that it writes to has already renamed earlier metrics.
const MARKS_OF_A_RUN: [&str; 2] = [".lock", "metrics.jsonl"];

/// Files that mark a Hugging Face model, such as an export of a run.
const MARKS_OF_A_MODEL: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

/// The entries of directories that are not training text, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Skipped {
    /// Files and directories whose name starts with a dot.
    pub hidden: usize,
    /// Program output: directories tagged as caches (`CACHEDIR.TAG`, such as cargo's `target`), directories of models, and
    /// the metrics, configs and checkpoints of training runs.
    pub outputs: usize,
    /// Files that are not valid UTF-8.
    pub not_text: usize,
    /// Files, lines and rows without a token.
    pub empty: usize,
    /// Pipes, sockets, and links to anything but a file.
    pub special: usize,
}

impl Skipped {
    /// Returns the number of skipped entries; a directory counts as one.
    pub fn total(&self) -> usize {
        self.hidden + self.outputs + self.not_text + self.empty + self.special
    }

    pub(in crate::data) fn add(&mut self, other: Self) {
        self.hidden += other.hidden;
        self.outputs += other.outputs;
        self.not_text += other.not_text;
        self.empty += other.empty;
        self.special += other.special;
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hidden, outputs, not_text, empty, special } = *self;
        let kinds = [
            (hidden, "hidden"),
            (outputs, "written by runs or other programs"),
            (not_text, "not UTF-8"),
            (empty, "empty"),
            (special, "not regular files"),
        ];
        let kinds = kinds.into_iter().filter(|(count, _)| *count > 0);
        let kinds: Vec<String> = kinds.map(|(count, kind)| format!("{count} {kind}")).collect();
        if kinds.is_empty() {
            f.write_str("no files skipped")
        } else {
            write!(f, "skipped: {}", kinds.join(", "))
        }
    }
}

/// The kind of a source file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::data) enum SourceKind {
    /// One document of UTF-8 text.
    Text,
    /// One document per line.
    JsonLines,
    /// One document per row.
    Parquet,
    /// A token file.
    Tokens(FileFormat),
}

/// A source file.
#[derive(Debug, Clone)]
pub(in crate::data) struct SourceFile {
    pub(in crate::data) path: PathBuf,
    pub(in crate::data) kind: SourceKind,
    /// Whether the file was given by name or pattern, so that it must be usable, rather than found in a directory.
    pub(in crate::data) is_named: bool,
}

/// Returns the files of a path: itself, the files of a directory, or those that match a pattern, ordered by path.
pub(in crate::data) fn expand(path: &Path, skipped: &mut Skipped) -> Result<Vec<SourceFile>, DataError> {
    match fs::metadata(path) {
        Ok(_) => named(path, skipped),
        Err(error) if error.kind() == io::ErrorKind::NotFound && is_pattern(path) => {
            let pattern = path.to_string_lossy();
            let failed =
                |message: &str| DataError::Pattern { path: path.to_owned(), message: message.to_owned() };
            let matches = glob::glob(&pattern).map_err(|error| failed(error.msg))?;
            let mut files = Vec::new();
            for found in matches {
                let found = found.map_err(|error| {
                    let path = error.path().to_owned();
                    read_error(&path, error.into())
                })?;
                files.extend(named(&found, skipped)?);
            }
            // A Megatron pair is one source, even if both names match.
            files.dedup_by(|next, file| {
                let pair = SourceKind::Tokens(FileFormat::Megatron);
                next.kind == pair
                    && file.kind == pair
                    && next.path.with_extension("") == file.path.with_extension("")
            });
            if files.is_empty() { Err(failed("nothing matches")) } else { Ok(files) }
        }
        Err(error) => Err(read_error(path, error)),
    }
}

fn is_pattern(path: &Path) -> bool {
    path.to_string_lossy().contains(['*', '?', '['])
}

/// Returns the files of an existing path.
fn named(path: &Path, skipped: &mut Skipped) -> Result<Vec<SourceFile>, DataError> {
    let metadata = fs::metadata(path).map_err(|source| read_error(path, source))?;
    if metadata.is_dir() {
        return directory(path, skipped);
    }
    if !metadata.is_file() {
        return Err(DataError::NotAFile { path: path.to_owned() });
    }
    let kind = match by_extension(path) {
        Some(kind) => kind,
        None if has_json_lines(path)? => SourceKind::JsonLines,
        None => TokenFile::detect(path)?.map_or(SourceKind::Text, SourceKind::Tokens),
    };
    Ok(vec![SourceFile { path: path.to_owned(), kind, is_named: true }])
}

/// Returns the kind of a file, if its extension determines it.
fn by_extension(path: &Path) -> Option<SourceKind> {
    match path.extension().and_then(OsStr::to_str)? {
        "jsonl" | "ndjson" => Some(SourceKind::JsonLines),
        "parquet" => Some(SourceKind::Parquet),
        _ => None,
    }
}

/// Returns whether a file is JSONL with the extension `.json`, as of many published datasets: whether its first line is a
/// whole object. A file that begins an array is, too, so that reading it says what to do.
fn has_json_lines(path: &Path) -> Result<bool, DataError> {
    if path.extension() != Some(OsStr::new("json")) {
        return Ok(false);
    }
    let mut line = Vec::new();
    let (file, _) = crate::regular_file::open(path).map_err(|source| read_error(path, source))?;
    let mut file = BufReader::new(file).take(MAX_FIRST_LINE_BYTES);
    file.read_until(b'\n', &mut line).map_err(|source| read_error(path, source))?;
    let line = line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&line);
    let is_object = serde_json::from_slice::<HashMap<String, IgnoredAny>>(line).is_ok();
    Ok(is_object || line.trim_ascii_start().starts_with(b"["))
}

/// Returns the files below `root`. Links to files are followed, links to directories are not: they may form cycles.
fn directory(root: &Path, skipped: &mut Skipped) -> Result<Vec<SourceFile>, DataError> {
    let mut files = Vec::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        let holds_a_run = MARKS_OF_A_RUN.iter().any(|name| directory.join(name).exists());
        let entries = fs::read_dir(&directory).map_err(|source| read_error(&directory, source))?;
        for entry in entries {
            let entry = entry.map_err(|source| read_error(&directory, source))?;
            let path = entry.path();
            let file_type = entry.file_type().map_err(|source| read_error(&path, source))?;
            let name = entry.file_name();
            let is_cache = file_type.is_dir() && path.join("CACHEDIR.TAG").exists();
            // A run that read the output and the exports of earlier runs would train on different data each time.
            let is_model = file_type.is_dir() && MARKS_OF_A_MODEL.iter().any(|name| path.join(name).exists());
            let is_of_a_run = holds_a_run && is_written_by_a_run(&name.to_string_lossy());
            if name.to_string_lossy().starts_with('.') {
                skipped.hidden += 1;
            } else if is_cache || is_model || is_of_a_run {
                skipped.outputs += 1;
            } else if file_type.is_dir() {
                directories.push(path);
            } else if file_type.is_file() || (file_type.is_symlink() && path.is_file()) {
                files.push(path);
            } else {
                skipped.special += 1;
            }
        }
    }
    files.sort_unstable();
    let files = files.into_iter().map(|path| Ok((found_kind(&path)?, path)));
    let files = files.collect::<Result<Vec<_>, DataError>>()?;
    let source = |(kind, path): (Option<_>, _)| Some(SourceFile { path, kind: kind?, is_named: false });
    Ok(files.into_iter().filter_map(source).collect())
}

/// Returns the kind of a file in a directory. A `.bin` file may be anything, so it is a token file only if its header or
/// an index next to it says so. An index is read with its `.bin`.
fn found_kind(path: &Path) -> Result<Option<SourceKind>, DataError> {
    if let Some(kind) = by_extension(path) {
        return Ok(Some(kind));
    }
    Ok(match TokenFile::detect(path)? {
        Some(FileFormat::Megatron) if path.extension() == Some(OsStr::new("idx")) => None,
        Some(FileFormat::NanoGpt) | None => Some(SourceKind::Text),
        Some(format) => Some(SourceKind::Tokens(format)),
    })
}

/// Returns whether a run writes a file of this name: `metrics.jsonl`, `config.json`, `run.json` and their predecessors
/// (`metrics.1.jsonl`), checkpoints, `latest`, the report, and monitor directories with default names.
fn is_written_by_a_run(name: &str) -> bool {
    if ["latest", "report.html", "tensorboard", "csv"].contains(&name) || name.starts_with("step_") {
        return true;
    }
    let (stem, extension) = name.split_once('.').unwrap_or((name, ""));
    match stem {
        "metrics" => extension.ends_with("jsonl"),
        "config" | "run" => extension.ends_with("json"),
        _ => false,
    }
}

/// Returns the error of a path that cannot be read.
pub(super) fn read_error(path: &Path, source: io::Error) -> DataError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound => DataError::Missing { path },
        _ => DataError::Read { path, source },
    }
}
