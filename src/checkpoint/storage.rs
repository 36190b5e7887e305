//! The file operations that a save consists of.
//!
//! Everything that a save does to a disk goes through [`Storage`], one call per write, fsync
//! and rename. So a test can end the process at each of them, or run out of space, without a
//! line of test code in the product. Reading needs no such seam: what was damaged is a file.

use std::fmt::Debug;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// A file system as far as saving needs one.
pub trait Storage: Send + Sync + Debug {
    /// Creates a directory, which must not exist.
    ///
    /// # Errors
    /// What the operating system reports; so for all methods.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Creates an empty file, in the place of one that has the name. A symbolic link of the name is replaced too, not
    /// followed.
    ///
    /// # Errors
    /// See [`create_dir`](Self::create_dir).
    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>>;

    /// Gives a file or directory another name, in one step: afterwards either name exists.
    /// An existing file of the new name is replaced.
    ///
    /// # Errors
    /// See [`create_dir`](Self::create_dir).
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Returns once what was created, renamed or removed in a directory will survive a loss of
    /// power.
    ///
    /// # Errors
    /// See [`create_dir`](Self::create_dir).
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Removes a directory and all that it holds.
    ///
    /// # Errors
    /// See [`create_dir`](Self::create_dir).
    fn remove_dir_all(&self, path: &Path) -> io::Result<()>;
}

/// A file that is being written.
pub trait StorageFile: Write + Send {
    /// Returns once what was written will survive a loss of power.
    ///
    /// # Errors
    /// What the operating system reports.
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
        // Only Unix opens directories as files, and only there this is needed.
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
