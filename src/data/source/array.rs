//! Reads the objects of a JSON array one by one.

use super::files::read_error;
use super::kind::BYTE_ORDER_MARK;
use super::reader::{self, Reader};
use super::records::Content;
use crate::data::{DataError, FileError};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::io::{self, BufRead};
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
        let mut file = reader::open(path, 0)?;
        if file.fill_buf().map_err(failed)?.starts_with(BYTE_ORDER_MARK) {
            file.consume(BYTE_ORDER_MARK.len());
        }
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

/// Consumes white space, and then `byte`. Returns the number of line ends, or `None` if another byte follows.
pub(super) fn skip_to(file: &mut impl BufRead, byte: u8) -> io::Result<Option<u64>> {
    let lines = skip_space(file)?;
    let is_next = file.fill_buf()?.first() == Some(&byte);
    file.consume(usize::from(is_next));
    Ok(is_next.then_some(lines))
}

/// Consumes white space; returns the number of line ends in it.
pub(super) fn skip_space(file: &mut impl BufRead) -> io::Result<u64> {
    let mut lines = 0;
    loop {
        match file.fill_buf()?.first() {
            Some(byte) if byte.is_ascii_whitespace() => lines += u64::from(*byte == b'\n'),
            _ => return Ok(lines),
        }
        file.consume(1);
    }
}
