//! Reads the rows of a table (CSV, TSV) as lines of JSON: one text per column that the first row names.

use super::reader::{self, Reader};
use super::record::Content;
use crate::data::{DataError, FileError};
use csv::{ReaderBuilder, StringRecord};
use serde_json::{Map, Value as Json};
use std::path::Path;

/// The rest of a table.
pub(super) struct Rows {
    table: csv::Reader<Reader>,
    header: StringRecord,
}

impl Rows {
    /// Opens a file after its first `skipped` rows.
    pub(super) fn open(path: &Path, delimiter: u8, skipped: u64) -> Result<Self, DataError> {
        let mut table = ReaderBuilder::new().delimiter(delimiter).from_reader(reader::open(path, 0)?);
        let header = table.headers().map_err(|error| failed(path, &error, 1))?.clone();
        let mut rows = Self { table, header };
        for _ in 0..skipped {
            rows.next(path)?;
        }
        Ok(rows)
    }

    /// Returns the next row as a line of JSON.
    pub(super) fn next(&mut self, path: &Path) -> Result<Option<Content>, DataError> {
        let (mut row, number) = (StringRecord::new(), self.table.position().line());
        Ok(match self.table.read_record(&mut row) {
            Ok(false) => None,
            Ok(true) => {
                let column = |(name, text): (&str, &str)| (name.to_owned(), Json::from(text));
                let object: Map<String, Json> = self.header.iter().zip(&row).map(column).collect();
                Some(Content::Line { number, bytes: Json::from(object).to_string().into_bytes() })
            }
            Err(error) if error.is_io_error() => return Err(failed(path, &error, number).into()),
            Err(error) => Some(Content::Broken(failed(path, &error, number))),
        })
    }
}

/// Returns the names of the columns; none if the file is no table.
pub(super) fn header(path: &Path, delimiter: u8) -> Result<Vec<String>, DataError> {
    let mut table = ReaderBuilder::new().delimiter(delimiter).from_reader(reader::open(path, 0)?);
    Ok(table.headers().map(|names| names.iter().map(str::to_owned).collect()).unwrap_or_default())
}

fn failed(path: &Path, error: &csv::Error, line: u64) -> FileError {
    let line = error.position().map_or(line, csv::Position::line);
    FileError::Line { path: path.to_owned(), line, problem: format!("not a row of the table: {error}") }
}
