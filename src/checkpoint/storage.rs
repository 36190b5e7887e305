//! The file operations of a save.
//!
//! All writes of a save go through [`Storage`], with one call per write, fsync and rename. Fault tests implement
//! it to kill the process at each operation, or to run out of disk space. Reads need no abstraction: tests damage
//! the files.

use std::fmt::Debug;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// The file-system operations that saving needs.
pub trait Storage: Send + Sync + Debug {
    /// Creates a directory, which must not exist.
    ///
    /// # Errors
    /// Returns the error of the operating system. This applies to all methods.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Creates an empty file, replacing an existing one. A symbolic link is replaced, not followed.
    ///
    /// # Errors
    /// See [`create_dir`](Self::create_dir).
    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>>;

    /// Renames a file or directory atomically, replacing an existing file.
    ///
    /// # Errors
    /// See [`create_dir`](Self::create_dir).
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Makes files created, renamed or removed in a directory durable (fsync).
    ///
    /// # Errors
    /// See [`create_dir`](Self::create_dir).
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Removes a directory and its content.
    ///
    /// # Errors
    /// See [`create_dir`](Self::create_dir).
    fn remove_dir_all(&self, path: &Path) -> io::Result<()>;
}

/// A file that is being written.
pub trait StorageFile: Write + Send {
    /// Makes the written data durable (fsync).
    ///
    /// # Errors
    /// Returns the error of the operating system.
    fn sync(&mut self) -> io::Result<()>;
}

/// The operating system's file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct LocalStorage;

impl Storage for LocalStorage {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        std::fs::create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(Box::new(File::create_new(path)?)),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        // Only Unix can open directories as files, and only Unix needs this.
        if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_dir_all(path)
    }
}

impl StorageFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}
