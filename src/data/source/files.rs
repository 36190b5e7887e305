//! Resolves paths, directories and patterns to files.

use super::kind::{SourceKind, extension, found_kind, named_kind};
use super::reader::read_error;
use super::skipped::Skipped;
use crate::data::storage::FileFormat;
use crate::data::{DataError, FileError};
use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Files that mark the output directory of a run: its lock, and the metrics of versions without lock. A run that reads
/// the directory that it writes to has already renamed earlier metrics.
const MARKS_OF_A_RUN: [&str; 2] = [".lock", "metrics.jsonl"];

/// Files that mark a Hugging Face model, such as an export of a run.
const MARKS_OF_A_MODEL: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

/// A source file.
#[derive(Debug, Clone)]
pub(in crate::data) struct SourceFile {
    pub(in crate::data) path: PathBuf,
    pub(in crate::data) kind: SourceKind,
    /// Whether the file was given by name or pattern, so that it must be usable, rather than found in a directory.
    pub(in crate::data) is_named: bool,
}

/// Returns the files of a path: itself, the files of a directory, or those that match a pattern, ordered by path.
pub(in crate::data) fn expand(
    path: &Path,
    text_field: &str,
    skipped: &mut Skipped,
) -> Result<Vec<SourceFile>, DataError> {
    match fs::metadata(path) {
        Ok(_) => named(path, text_field, skipped),
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
                files.extend(named(&found, text_field, skipped)?);
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
        Err(error) if error.kind() == io::ErrorKind::NotFound && index_of(path).exists() => {
            named(&index_of(path), text_field, skipped)
        }
        Err(error) => Err(read_error(path, error)),
    }
}

/// Returns the index of a Megatron pair from its prefix, as in `--data-path`.
fn index_of(prefix: &Path) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(".idx");
    name.into()
}

fn is_pattern(path: &Path) -> bool {
    path.to_string_lossy().contains(['*', '?', '['])
}

/// Returns the files of an existing path.
fn named(path: &Path, text_field: &str, skipped: &mut Skipped) -> Result<Vec<SourceFile>, DataError> {
    let metadata = fs::metadata(path).map_err(|source| read_error(path, source))?;
    if metadata.is_dir() {
        return directory(path, text_field, skipped);
    }
    if !metadata.is_file() {
        return Err(DataError::NotAFile { path: path.to_owned() });
    }
    let kind = named_kind(path)?.map_err(|advice| FileError::NotRead { path: path.to_owned(), advice })?;
    Ok(vec![SourceFile { path: path.to_owned(), kind, is_named: true }])
}

/// Returns the files below `root`. Links to files are followed, links to directories are not: they may form cycles.
fn directory(root: &Path, text_field: &str, skipped: &mut Skipped) -> Result<Vec<SourceFile>, DataError> {
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
    let mut sources = Vec::new();
    for path in files {
        match found_kind(&path, text_field)? {
            Some(kind) => sources.push(SourceFile { path, kind, is_named: false }),
            // The index of a pair is read with its `.bin`.
            None if path.extension().is_some_and(|extension| extension == "idx") => {}
            None => skipped.other_formats += 1,
        }
    }
    let before = sources.len();
    let with_samples: HashSet<PathBuf> = sources
        .iter()
        .filter(|file| file.kind.has_samples())
        .filter_map(|file| file.path.parent())
        .map(Path::to_owned)
        .collect();
    sources.retain(|SourceFile { path, kind, .. }| {
        let describes_samples = path.parent().is_some_and(|parent| with_samples.contains(parent));
        kind.has_samples() || !describes_samples || extension(path) == "txt"
    });
    skipped.beside_samples += before - sources.len();
    Ok(sources)
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
