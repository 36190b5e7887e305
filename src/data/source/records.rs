//! Documents as they lie in files, in batches, from any place on.

use super::files::{SourceFile, SourceKind, read_error};
use crate::data::{DataError, FileError, Skipped};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of text that are handed out together: enough to occupy every core, little beside a machine's memory.
const BATCH_BYTES: usize = 8 << 20;

/// A document that is not tokenized yet.
#[derive(Debug)]
pub(in crate::data) struct Record {
    pub(super) path: Arc<PathBuf>,
    pub(super) content: Content,
}

#[derive(Debug)]
pub(super) enum Content {
    Text(String),
    /// A line of JSON, counted from 1. Whether it is UTF-8 is seen where it is parsed.
    Line {
        number: u64,
        bytes: Vec<u8>,
    },
}

/// Documents that follow each other.
#[derive(Debug)]
pub(in crate::data) struct Batch {
    pub(in crate::data) records: Vec<Record>,
    /// Bytes of text and lines.
    pub(in crate::data) bytes: usize,
    /// Where the next batch begins.
    pub(in crate::data) next: Position,
}

/// A place between documents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::data) struct Position {
    /// Files before this place.
    pub(in crate::data) file: usize,
    /// Bytes of the file before it, where the file holds lines.
    pub(in crate::data) offset: u64,
    /// Lines or rows of the file before it.
    pub(in crate::data) record: u64,
}

impl Position {
    /// After all of `files`.
    pub(in crate::data) fn end(files: &[SourceFile]) -> Self {
        Self { file: files.len(), ..Self::default() }
    }
}

/// Reads the documents of files, in order.
#[derive(Debug)]
pub(in crate::data) struct Records<'a> {
    files: &'a [SourceFile],
    text_field: &'a str,
    position: Position,
    /// The file at the position, once it is open.
    open: Option<(Arc<PathBuf>, Open)>,
    pub(in crate::data) skipped: Skipped,
}

#[derive(Debug)]
enum Open {
    Text {
        is_named: bool,
    },
    Lines(BufReader<File>),
    #[cfg(feature = "parquet")]
    Rows(Box<super::parquet::Rows>),
}

impl<'a> Records<'a> {
    /// Starts at a place of `files`, none of which holds tokens.
    pub(in crate::data) fn new(files: &'a [SourceFile], text_field: &'a str, position: Position) -> Self {
        Self { files, text_field, position, open: None, skipped: Skipped::default() }
    }

    /// The next documents, or `None` after the last.
    pub(in crate::data) fn next_batch(&mut self) -> Result<Option<Batch>, DataError> {
        let mut batch = Batch { records: Vec::new(), bytes: 0, next: self.position };
        while batch.bytes < BATCH_BYTES && self.position.file < self.files.len() {
            match self.next_record()? {
                Some(record) => {
                    batch.bytes += record.len();
                    batch.records.push(record);
                }
                None => {
                    self.position = Position { file: self.position.file + 1, ..Position::default() };
                    self.open = None;
                }
            }
        }
        batch.next = self.position;
        Ok((!batch.records.is_empty()).then_some(batch))
    }

    /// The next document of the file at the position.
    fn next_record(&mut self) -> Result<Option<Record>, DataError> {
        let (path, open) = match &mut self.open {
            Some(open) => open,
            None => self.open.insert(open(&self.files[self.position.file], self.text_field, self.position)?),
        };
        let content = match open {
            Open::Text { .. } if self.position.record > 0 => None,
            Open::Text { is_named } => {
                self.position.record = 1;
                let text = read_text(path)?;
                if text.is_none() {
                    if *is_named {
                        return Err(DataError::NotText { path: path.to_path_buf() });
                    }
                    self.skipped.not_text += 1;
                }
                text.map(Content::Text)
            }
            Open::Lines(reader) => next_line(reader, path, &mut self.position)?,
            #[cfg(feature = "parquet")]
            Open::Rows(rows) => {
                let text = rows.next(path, self.position.record)?;
                self.position.record += u64::from(text.is_some());
                text.map(Content::Text)
            }
        };
        Ok(content.map(|content| Record { path: path.clone(), content }))
    }
}

impl Record {
    /// Bytes of text.
    pub(super) fn len(&self) -> usize {
        match &self.content {
            Content::Text(text) => text.len(),
            Content::Line { bytes, .. } => bytes.len(),
        }
    }
}

fn open(file: &SourceFile, text_field: &str, position: Position) -> Result<(Arc<PathBuf>, Open), DataError> {
    let path = &file.path;
    let open = match file.kind {
        SourceKind::Text => Open::Text { is_named: file.is_named },
        SourceKind::JsonLines => {
            let mut lines = File::open(path).map_err(|source| read_error(path, source))?;
            lines.seek(SeekFrom::Start(position.offset)).map_err(|source| read_error(path, source))?;
            Open::Lines(BufReader::with_capacity(1 << 20, lines))
        }
        #[cfg(feature = "parquet")]
        SourceKind::Parquet => {
            Open::Rows(Box::new(super::parquet::Rows::open(path, text_field, position.record)?))
        }
        #[cfg(not(feature = "parquet"))]
        SourceKind::Parquet => {
            let _ = text_field;
            return Err(FileError::NotBuilt { path: path.clone(), feature: "parquet" }.into());
        }
        SourceKind::Tokens(_) => return Err(FileError::AlreadyTokens { path: path.clone() }.into()),
    };
    Ok((Arc::new(path.clone()), open))
}

/// The next line that is not blank, without its end.
fn next_line(
    reader: &mut impl BufRead,
    path: &Path,
    position: &mut Position,
) -> Result<Option<Content>, DataError> {
    loop {
        let mut bytes = Vec::new();
        let read = reader.read_until(b'\n', &mut bytes).map_err(|source| read_error(path, source))?;
        if read == 0 {
            return Ok(None);
        }
        position.offset += read as u64;
        position.record += 1;
        bytes.truncate(bytes.trim_ascii_end().len());
        if !bytes.is_empty() {
            return Ok(Some(Content::Line { number: position.record, bytes }));
        }
    }
}

/// The file's text, or `None` when it is not valid UTF-8.
fn read_text(path: &Path) -> Result<Option<String>, DataError> {
    let bytes = fs::read(path).map_err(|source| read_error(path, source))?;
    Ok(String::from_utf8(bytes).ok())
}
