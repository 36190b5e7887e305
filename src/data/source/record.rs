//! [`Record`]: a document before it is tokenized.

use crate::data::FileError;
use std::path::PathBuf;
use std::sync::Arc;

/// An untokenized document.
#[derive(Debug)]
pub(in crate::data) struct Record {
    pub(in crate::data) path: Arc<PathBuf>,
    pub(in crate::data) content: Content,
}

#[derive(Debug)]
pub(in crate::data) enum Content {
    Text(String),
    /// A line of JSON, counted from 1. UTF-8 is checked by the parser.
    Line {
        number: u64,
        bytes: Vec<u8>,
    },
    /// A row that cannot be read, unlike those after it.
    Broken(FileError),
}

impl Record {
    /// Returns the bytes of text.
    pub(in crate::data) fn len(&self) -> usize {
        match &self.content {
            Content::Text(text) => text.len(),
            Content::Line { bytes, .. } => bytes.len(),
            Content::Broken(_) => 0,
        }
    }
}
