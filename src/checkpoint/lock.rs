//! [`OutputLock`]: exclusive access of one job to an output directory.

use super::CheckpointError;
use crate::regular_file;
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

/// Name of the lock file.
const LOCK: &str = ".lock";

/// Maximum number of bytes that an error message quotes from the lock file.
const MAX_HOLDER_BYTES: u64 = 1000;

/// An exclusive lock on an output directory, released on drop.
///
/// The operating system releases the lock (`flock`) of a killed job. The file stays: if it were removed, two jobs
/// could lock two files of the same name.
#[derive(Debug)]
pub struct OutputLock {
    _file: File,
}

impl OutputLock {
    /// Locks an existing directory for the job that `holder` describes.
    ///
    /// # Errors
    /// Returns [`CheckpointError::InUse`] with the description of the job that holds the lock.
    pub fn acquire(directory: &Path, holder: &str) -> Result<Self, CheckpointError> {
        let path = directory.join(LOCK);
        let io = |operation| CheckpointError::io(operation, &path);
        let mut file = regular_file::open_to_write(&path).map_err(io("open"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(io("lock")(error)),
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // The directory is in use even if the holder cannot be read.
                let _ = file.take(MAX_HOLDER_BYTES).read_to_string(&mut holder);
                let holder = match holder.trim() {
                    "" => "a job that has just started",
                    holder => holder,
                };
                let (directory, holder) = (directory.to_owned(), holder.to_owned());
                return Err(CheckpointError::InUse { directory, holder });
            }
        }
        file.set_len(0).map_err(io("write"))?;
        file.seek(SeekFrom::Start(0)).map_err(io("write"))?;
        writeln!(file, "{holder}").map_err(io("write"))?;
        Ok(Self { _file: file })
    }
}
