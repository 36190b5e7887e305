//! Reads the text column of a Parquet file.

use crate::data::{DataError, FileError};
use parquet::basic::Type;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use std::collections::VecDeque;
use std::fs::File;
use std::panic::AssertUnwindSafe;
use std::path::Path;

/// Number of rows that are decoded at once.
const ROWS: usize = 256;

/// Reads one column row by row.
pub(super) struct Rows {
    file: SerializedFileReader<File>,
    column: usize,
    next_group: usize,
    group: Option<ColumnReaderImpl<ByteArrayType>>,
    ready: VecDeque<String>,
}

impl std::fmt::Debug for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rows").field("column", &self.column).finish_non_exhaustive()
    }
}

impl Rows {
    /// Opens a file after its first `skipped` rows.
    pub(super) fn open(path: &Path, text_field: &str, skipped: u64) -> Result<Self, DataError> {
        let failed = |source| FileError::Parquet { path: path.to_owned(), row: 0, source };
        let (file, _) =
            crate::regular_file::open(path).map_err(|source| super::reader::read_error(path, source))?;
        let file = guarded(|| SerializedFileReader::new(file)).map_err(failed)?;
        let column = text_column(&file, text_field).map_err(failed)?;
        let mut rows = Self { file, column, next_group: 0, group: None, ready: VecDeque::new() };
        for row in 0..skipped {
            rows.next(path, row)?;
        }
        Ok(rows)
    }

    /// Returns the text of the next row, empty for null; `row` is its index for errors.
    pub(super) fn next(&mut self, path: &Path, row: u64) -> Result<Option<String>, DataError> {
        let failed = |source| FileError::Parquet { path: path.to_owned(), row, source };
        while self.ready.is_empty() {
            let Some(group) = &mut self.group else {
                if self.next_group == self.file.num_row_groups() {
                    return Ok(None);
                }
                self.group = Some(guarded(|| self.open_group()).map_err(failed)?);
                self.next_group += 1;
                continue;
            };
            match guarded(|| read_rows(group)).map_err(failed)? {
                rows if rows.is_empty() => self.group = None,
                rows => self.ready.extend(rows),
            }
        }
        Ok(self.ready.pop_front())
    }

    fn open_group(&self) -> Result<ColumnReaderImpl<ByteArrayType>, ParquetError> {
        match self.file.get_row_group(self.next_group)?.get_column_reader(self.column)? {
            ColumnReader::ByteArrayColumnReader(reader) => Ok(reader),
            _ => Err(ParquetError::General("the column changes its type between row groups".into())),
        }
    }
}

/// Calls the library, and converts its panics on damaged files into errors.
fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, ParquetError> {
    // The reader is not used after an error.
    std::panic::catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|_| Err(ParquetError::General("the file is damaged: the decoder panicked".into())))
}

/// Returns the index of the string column `name`.
fn text_column(file: &SerializedFileReader<File>, name: &str) -> Result<usize, ParquetError> {
    let schema = file.metadata().file_metadata().schema_descr();
    let columns = schema.columns();
    let Some(at) = columns.iter().position(|column| column.path().string() == name) else {
        let names: Vec<_> = columns.iter().take(20).map(|column| column.path().string()).collect();
        return Err(ParquetError::General(format!(
            "no column `{name}`; the columns are: {}",
            names.join(", ")
        )));
    };
    if columns[at].physical_type() != Type::BYTE_ARRAY || columns[at].max_rep_level() > 0 {
        let found = columns[at].physical_type();
        return Err(ParquetError::General(format!(
            "column `{name}` contains {found}, not one string per row"
        )));
    }
    Ok(at)
}

/// Reads the next rows of a row group; none at its end.
fn read_rows(group: &mut ColumnReaderImpl<ByteArrayType>) -> Result<Vec<String>, ParquetError> {
    let (mut levels, mut values) = (Vec::<i16>::new(), Vec::<ByteArray>::new());
    let (rows, _, _) = group.read_records(ROWS, Some(&mut levels), None, &mut values)?;
    // A column without nulls has no levels.
    let is_null = |row: usize| levels.iter().max().is_some_and(|&top| levels[row] < top);
    let all_null = values.is_empty();
    let mut values = values.into_iter();
    let text = |row| match all_null || is_null(row) {
        true => Ok(String::new()),
        false => {
            let value = values.next().ok_or_else(|| ParquetError::EOF("a page lacks values".into()))?;
            Ok(value.as_utf8()?.to_owned())
        }
    };
    (0..rows).map(text).collect()
}
