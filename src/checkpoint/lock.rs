//! [`OutputLock`]: one job per output directory.

use super::CheckpointError;
use crate::regular_file;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

/// Name of the lock file.
const LOCK: &str = ".lock";

/// Bytes of the lock file that a message quotes.
const MAX_HOLDER_BYTES: u64 = 1000;

/// The right to write to an output directory, until it is dropped.
///
/// The operating system holds the lock (`flock`), so a job that was killed holds none. The
/// file stays: removing it would let two jobs lock two files of one name.
#[derive(Debug)]
pub struct OutputLock {
    _file: File,
}

impl OutputLock {
    /// Takes the lock of a directory, which exists, for the job that `holder` describes.
    ///
    /// # Errors
    /// [`CheckpointError::InUse`] with the description of the job that holds it.
    pub fn acquire(directory: &Path, holder: &str) -> Result<Self, CheckpointError> {
        let path = directory.join(LOCK);
        let io = |operation| CheckpointError::io(operation, &path);
        // What a link names is not ours to empty, and a pipe holds no lock.
        if let Ok(metadata) = path.symlink_metadata() {
            regular_file::check(&metadata).map_err(io("open"))?;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let mut file = options.open(&path).map_err(io("open"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(io("lock")(error)),
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // Whoever cannot be read holds it all the same.
                let _ = file.take(MAX_HOLDER_BYTES).read_to_string(&mut holder);
                let directory = directory.to_owned();
                return Err(CheckpointError::InUse { directory, holder: holder.trim().to_owned() });
            }
        }
        file.set_len(0).map_err(io("write"))?;
        file.seek(SeekFrom::Start(0)).map_err(io("write"))?;
        writeln!(file, "{holder}").map_err(io("write"))?;
        Ok(Self { _file: file })
    }
}
