//! A file that a run appends to, and that a full disk does not corrupt.

use crate::regular_file;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::Path;

/// Maximum bytes that wait in memory for disk space.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// Appends whole records. When the disk is full, a record or the rest of it waits in memory, and is written before the
/// next one.
#[derive(Debug)]
pub(super) struct AppendFile<W: Write = File> {
    file: W,
    waiting: Vec<u8>,
}

impl<W: Write> AppendFile<W> {
    pub(super) fn new(file: W) -> Self {
        Self { file, waiting: Vec::new() }
    }

    /// Adds a record, which [`flush`](Self::flush) writes.
    pub(super) fn push(&mut self, record: &[u8]) -> io::Result<()> {
        if self.waiting.len() + record.len() > MAX_WAITING_BYTES {
            return Err(io::Error::other(format!(
                "the disk is full, and so is the buffer of {MAX_WAITING_BYTES} bytes for unwritten records"
            )));
        }
        self.waiting.extend_from_slice(record);
        Ok(())
    }

    /// Appends a record; readers see it immediately.
    pub(super) fn append(&mut self, record: &[u8]) -> io::Result<()> {
        self.push(record)?;
        self.flush()
    }

    /// Writes waiting records, as far as there is disk space.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let mut written = 0;
        let mut result = Ok(());
        while written < self.waiting.len() && result.is_ok() {
            match self.file.write(&self.waiting[written..]) {
                Ok(0) => result = Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => written += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => result = Err(error),
            }
        }
        self.waiting.drain(..written);
        result
    }
}

impl AppendFile {
    /// Replaces the contents of a file by `lines`, and appends to it. The new file has another name until it is complete,
    /// so that a crash or a full disk does not lose the old contents.
    pub(super) fn replacing(path: &Path, lines: impl IntoIterator<Item: Display>) -> io::Result<Self> {
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(".part");
        let mut file = BufWriter::new(regular_file::create(Path::new(&unfinished))?);
        for line in lines {
            writeln!(file, "{line}")?;
        }
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        std::fs::rename(&unfinished, path)?;
        Ok(Self::new(file))
    }
}

impl<W: Write> Drop for AppendFile<W> {
    /// Tries again to write waiting records.
    fn drop(&mut self) {
        let _ = self.flush();
    }
}

/// Returns whether an error means that the disk is full. The records wait in memory and can be written later.
pub fn is_out_of_space(error: &io::Error) -> bool {
    [ErrorKind::StorageFull, ErrorKind::QuotaExceeded, ErrorKind::FileTooLarge].contains(&error.kind())
}

/// Returns the text of a file, or an empty string if it does not exist.
pub(super) fn read_if_there(path: &std::path::Path) -> io::Result<String> {
    match regular_file::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        text => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with a limited number of free bytes.
    #[derive(Default)]
    struct Disk {
        room: usize,
        written: Vec<u8>,
    }

    impl Write for &mut Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let bytes = &bytes[..bytes.len().min(self.room)];
            if bytes.is_empty() {
                return Err(ErrorKind::StorageFull.into());
            }
            self.room -= bytes.len();
            self.written.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn records_wait_in_order_while_the_disk_is_full() {
        let mut disk = Disk { room: 6, ..Disk::default() };
        let mut file = AppendFile::new(&mut disk);
        file.append(b"one\n").unwrap();
        for record in [b"two\n", b"six\n"] {
            assert!(is_out_of_space(&file.append(record).unwrap_err()));
        }
        file.file.room = 100;
        file.append(b"ten\n").unwrap();
        drop(file);
        assert_eq!(disk.written, b"one\ntwo\nsix\nten\n");
    }

    #[test]
    fn waiting_records_are_written_on_drop() {
        let mut disk = Disk::default();
        let mut file = AppendFile::new(&mut disk);
        assert!(file.append(b"one\n").is_err());
        file.file.room = 100;
        drop(file);
        assert_eq!(disk.written, b"one\n");
    }

    #[test]
    fn waiting_bytes_are_bounded() {
        let mut disk = Disk::default();
        let mut file = AppendFile::new(&mut disk);
        let error = file.append(&vec![0; MAX_WAITING_BYTES + 1]).unwrap_err();
        assert!(!is_out_of_space(&error), "{error}");
    }
}
