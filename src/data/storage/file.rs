//! Reads at places of a file, never through a mapping.
//!
//! A mapped file that shrinks ends the process with a SIGBUS; a read at a place past the end is an error. The
//! page cache serves both alike, and a row is far larger than what a system call costs.

use crate::data::FileError;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// A file of which pieces are read, and its size when it was opened.
#[derive(Debug)]
pub(super) struct DataFile {
    file: File,
    path: PathBuf,
    len: u64,
}

impl DataFile {
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        let failed = |source| FileError::Io { path: path.to_owned(), operation: "open the file", source };
        let file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        Ok(Self { file, path: path.to_owned(), len })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes when the file was opened.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Fills a buffer from a place in the file.
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), FileError> {
        match read_exact_at(&self.file, buffer, offset) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(self.truncated(offset, buffer.len() as u64))
            }
            Err(source) => Err(self.read_failed(source)),
        }
    }

    /// `N` bytes from a place in the file.
    pub(super) fn array<const N: usize>(&self, offset: u64) -> Result<[u8; N], FileError> {
        let mut bytes = [0; N];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// The first bytes of the file, as many as there are.
    pub(super) fn beginning<const N: usize>(&self) -> Result<Vec<u8>, FileError> {
        let mut bytes = vec![0; N.min(usize::try_from(self.len).unwrap_or(N))];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// The error of a number that cannot be true.
    pub(super) fn field(
        &self,
        offset: u64,
        field: &'static str,
        found: u64,
        valid: impl Into<String>,
    ) -> FileError {
        FileError::Field { path: self.path.clone(), offset, field, found, valid: valid.into() }
    }

    /// The error of bytes that are not there.
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
