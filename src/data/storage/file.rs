//! Reads files at offsets (`pread`), without memory mapping.
//!
//! A mapped file that shrinks kills the process with SIGBUS; a read past the end is an error. Both use the page cache,
//! and a sequence is large enough for the cost of a system call not to matter.

use crate::data::FileError;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// A file that is read at offsets, with its size at opening.
#[derive(Debug)]
pub(super) struct DataFile {
    file: File,
    path: PathBuf,
    len: u64,
}

impl DataFile {
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        let failed = |source| FileError::Io { path: path.to_owned(), operation: "open the file", source };
        let (file, len) = crate::regular_file::open(path).map_err(failed)?;
        Ok(Self { file, path: path.to_owned(), len })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size of the file at opening.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Fills a buffer from `offset`.
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), FileError> {
        match read_exact_at(&self.file, buffer, offset) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(self.truncated(offset, buffer.len() as u64))
            }
            Err(source) => Err(self.read_failed(source)),
        }
    }

    /// Reads `N` bytes from `offset`.
    pub(super) fn array<const N: usize>(&self, offset: u64) -> Result<[u8; N], FileError> {
        let mut bytes = [0; N];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the first `N` bytes of the file, or fewer if it is shorter.
    pub(super) fn beginning<const N: usize>(&self) -> Result<Vec<u8>, FileError> {
        let mut bytes = vec![0; N.min(usize::try_from(self.len).unwrap_or(N))];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns the error of an invalid number.
    pub(super) fn field(
        &self,
        offset: u64,
        field: &'static str,
        found: u64,
        valid: impl Into<String>,
    ) -> FileError {
        FileError::Field { path: self.path.clone(), offset, field, found, valid: valid.into() }
    }

    /// Returns the error of missing bytes.
    pub(super) fn truncated(&self, offset: u64, needed_bytes: u64) -> FileError {
        let file_bytes = self.file.metadata().map_or(self.len, |metadata| metadata.len());
        FileError::Truncated { path: self.path.clone(), offset, needed_bytes, file_bytes }
    }

    fn read_failed(&self, source: io::Error) -> FileError {
        FileError::Io { path: self.path.clone(), operation: "read the file", source }
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, buffer, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                buffer = &mut buffer[count..];
                offset += count as u64;
            }
        }
    }
    Ok(())
}
