//! Reads untokenized documents from files, in batches, from any position.

use super::array::Elements;
use super::binary::describe_binary;
use super::files::SourceFile;
use super::kind::SourceKind;
use super::reader::{self, Reader, read_document};
use super::record::{Content, Record};
use super::table;
use crate::data::{DataError, FileError, Skipped};
use serde::{Deserialize, Serialize};
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of text per batch: enough to use every core, little compared with the machine's memory.
const BATCH_BYTES: usize = 8 << 20;

/// Consecutive documents.
#[derive(Debug)]
pub(in crate::data) struct RecordBatch {
    pub(in crate::data) records: Vec<Record>,
    /// Bytes of text and lines.
    pub(in crate::data) bytes: usize,
    /// The position of the next batch.
    pub(in crate::data) next: Position,
}

/// A position between documents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::data) struct Position {
    /// The index of the file.
    pub(in crate::data) file: usize,
    /// The byte offset in a file of lines.
    pub(in crate::data) offset: u64,
    /// Lines or rows of the file before the position.
    pub(in crate::data) record: u64,
}

impl Position {
    /// Returns the position after all `files`.
    pub(in crate::data) fn end(files: &[SourceFile]) -> Self {
        Self { file: files.len(), ..Self::default() }
    }

    /// Counts a document of a file that is read by numbers of documents.
    fn count(&mut self, content: Option<Content>) -> Option<Content> {
        self.record += u64::from(content.is_some());
        content
    }
}

/// Reads the documents of files in order.
pub(in crate::data) struct Records<'a> {
    files: &'a [SourceFile],
    text_field: &'a str,
    position: Position,
    /// The open file at the position.
    open: Option<(Arc<PathBuf>, Open)>,
    pub(in crate::data) skipped: Skipped,
}

enum Open {
    Text {
        is_named: bool,
    },
    Lines(Reader),
    Array(Elements),
    Table(table::Rows),
    #[cfg(feature = "parquet")]
    Rows(Box<super::parquet::Rows>),
}

impl<'a> Records<'a> {
    /// Starts at a position of `files`, none of which may be a token file.
    pub(in crate::data) fn new(files: &'a [SourceFile], text_field: &'a str, position: Position) -> Self {
        Self { files, text_field, position, open: None, skipped: Skipped::default() }
    }

    /// Returns the next documents, or `None` after the last.
    pub(in crate::data) fn next_batch(&mut self) -> Result<Option<RecordBatch>, DataError> {
        let mut batch = RecordBatch { records: Vec::new(), bytes: 0, next: self.position };
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

    /// Returns the next document of the current file.
    fn next_record(&mut self) -> Result<Option<Record>, DataError> {
        let (path, open) = match &mut self.open {
            Some(open) => open,
            None => self.open.insert(open(&self.files[self.position.file], self.text_field, self.position)?),
        };
        let content = match open {
            Open::Text { .. } if self.position.record > 0 => None,
            Open::Text { is_named } => {
                self.position.record = 1;
                match read_text(path)? {
                    Err(advice) if *is_named => {
                        return Err(DataError::NotText { path: path.to_path_buf(), advice });
                    }
                    text => {
                        self.skipped.not_text += usize::from(text.is_err());
                        text.ok().map(Content::Text)
                    }
                }
            }
            Open::Lines(reader) => next_line(reader, path, &mut self.position)?,
            Open::Array(elements) => self.position.count(elements.next(path)?),
            Open::Table(rows) => self.position.count(rows.next(path)?),
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

fn open(file: &SourceFile, text_field: &str, position: Position) -> Result<(Arc<PathBuf>, Open), DataError> {
    let path = &file.path;
    let open = match file.kind {
        SourceKind::Text => Open::Text { is_named: file.is_named },
        SourceKind::JsonLines => Open::Lines(reader::open(path, position.offset)?),
        SourceKind::JsonArray => Open::Array(Elements::open(path, position.record)?),
        SourceKind::Table { delimiter } => Open::Table(table::Rows::open(path, delimiter, position.record)?),
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

/// Returns the next non-blank line, without its line ending.
fn next_line(
    reader: &mut impl BufRead,
    path: &Path,
    position: &mut Position,
) -> Result<Option<Content>, DataError> {
    loop {
        let mut bytes = Vec::new();
        let read = read_document(reader, Some(b'\n'), path, &mut bytes)?;
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

/// Returns the text of a file, or what to do if it is not valid UTF-8.
fn read_text(path: &Path) -> Result<Result<String, &'static str>, DataError> {
    let mut file = match reader::open(path, 0) {
        Err(DataError::NotText { advice, .. }) => return Ok(Err(advice)),
        file => file?,
    };
    let mut bytes = Vec::new();
    read_document(&mut file, None, path, &mut bytes)?;
    Ok(String::from_utf8(bytes).map_err(|error| describe_binary(error.as_bytes())))
}
