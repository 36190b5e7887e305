//! Reads the objects of a JSON array one by one.

use super::reader::{self, Reader, read_error, skip_space, skip_to};
use super::record::Content;
use crate::data::{DataError, FileError};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::io::BufRead;
use std::path::Path;

/// The rest of an array.
pub(super) struct Elements {
    file: Reader,
    /// The line of the next byte, from 1.
    line: u64,
}

impl Elements {
    /// Opens a file after its first `skipped` elements.
    pub(super) fn open(path: &Path, skipped: u64) -> Result<Self, DataError> {
        let failed = |source| read_error(path, source);
        let mut file = reader::open_json(path)?;
        let line = 1 + skip_to(&mut file, b'[').map_err(failed)?.unwrap_or_default();
        let mut elements = Self { file, line };
        for _ in 0..skipped {
            elements.next(path)?;
        }
        Ok(elements)
    }

    /// Returns the next object as a line of JSON, with the line where it begins.
    pub(super) fn next(&mut self, path: &Path) -> Result<Option<Content>, DataError> {
        let failed = |source| read_error(path, source);
        // After an element; an array that ends early fails in the parser.
        self.line += skip_space(&mut self.file).map_err(failed)?;
        if skip_to(&mut self.file, b']').map_err(failed)?.is_some() {
            return Ok(None);
        }
        skip_to(&mut self.file, b',').map_err(failed)?;
        self.line += skip_space(&mut self.file).map_err(failed)?;
        let line = self.line;
        let error = |problem: String| FileError::Line { path: path.to_owned(), line, problem };
        if self.file.fill_buf().map_err(failed)?.first() != Some(&b'{') {
            return Err(error("expected an array of objects".to_owned()).into());
        }
        let mut parser = serde_json::Deserializer::from_reader(&mut self.file);
        let object = Box::<RawValue>::deserialize(&mut parser).map_err(|source| {
            error(format!("not valid JSON: {source}, counted from the object's first line"))
        })?;
        self.line += object.get().bytes().filter(|&byte| byte == b'\n').count() as u64;
        Ok(Some(Content::Line { number: line, bytes: String::from(Box::<str>::from(object)).into_bytes() }))
    }
}
