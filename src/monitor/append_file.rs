//! A file that grows as a run goes on, and that a full disk does not spoil.

use crate::regular_file;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::Path;

/// The most bytes that wait for room.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// Appends whole records. One that finds no room, or room for a part of it only, waits in memory and goes before the
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

    /// Appends a record once [`flush`](Self::flush) is called.
    pub(super) fn push(&mut self, record: &[u8]) -> io::Result<()> {
        if self.waiting.len() + record.len() > MAX_WAITING_BYTES {
            return Err(io::Error::other(format!("{MAX_WAITING_BYTES} bytes wait for room already")));
        }
        self.waiting.extend_from_slice(record);
        Ok(())
    }

    /// Appends a record, so that a reader sees it at once.
    pub(super) fn append(&mut self, record: &[u8]) -> io::Result<()> {
        self.push(record)?;
        self.flush()
    }

    /// Writes what waits, as far as there is room.
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
    /// Goes on behind `lines`, which replace the content of a file. It has another name until it is complete: a crash or
    /// a full disk must not lose what there was.
    pub(super) fn replacing(path: &Path, lines: impl IntoIterator<Item: Display>) -> io::Result<Self> {
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(".part");
        let mut file = BufWriter::new(File::create(&unfinished)?);
        for line in lines {
            writeln!(file, "{line}")?;
        }
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        std::fs::rename(&unfinished, path)?;
        Ok(Self::new(file))
    }
}

impl<W: Write> Drop for AppendFile<W> {
    /// There may be room by now.
    fn drop(&mut self) {
        let _ = self.flush();
    }
}

/// Whether an error says that there is no room: what was to be written waits, and may be tried again.
pub fn is_out_of_space(error: &io::Error) -> bool {
    [ErrorKind::StorageFull, ErrorKind::QuotaExceeded, ErrorKind::FileTooLarge].contains(&error.kind())
}

/// The text of a file that may not be there.
pub(super) fn read_if_there(path: &std::path::Path) -> io::Result<String> {
    match regular_file::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        text => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with room for so many bytes.
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
    fn records_that_find_no_room_wait_in_order_until_there_is() {
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
    fn what_waits_is_written_in_the_end_if_it_can_be() {
        let mut disk = Disk::default();
        let mut file = AppendFile::new(&mut disk);
        assert!(file.append(b"one\n").is_err());
        file.file.room = 100;
        drop(file);
        assert_eq!(disk.written, b"one\n");
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut disk = Disk::default();
        let mut file = AppendFile::new(&mut disk);
        let error = file.append(&vec![0; MAX_WAITING_BYTES + 1]).unwrap_err();
        assert!(!is_out_of_space(&error), "{error}");
    }
}
