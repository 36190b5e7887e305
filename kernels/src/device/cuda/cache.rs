//! The cache of compiled kernels and of verdicts on them, in `$XDG_CACHE_HOME/ulysses` or `~/.cache/ulysses`.

use std::fs::{self, File, TryLockError};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

/// The file for a key and this version of the program; `None` without a home directory.
pub(super) fn path(name: &str, key: impl Hash, extension: &str) -> Option<PathBuf> {
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let folder = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?.join("ulysses");
    let mut hasher = DefaultHasher::new();
    (key, env!("CARGO_PKG_VERSION")).hash(&mut hasher);
    Some(folder.join(format!("{name}-{:016x}.{extension}", hasher.finish())))
}

/// Writes a file atomically, because ranks start at the same time.
pub(in crate::device) fn store(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
    create_parent(path)?;
    fs::write(&unfinished, content)?;
    fs::rename(&unfinished, path)
}

/// Waits until no other process has the lock of a file; returns the lock, which ends when it is dropped.
pub(in crate::device) fn lock(path: &Path) -> std::io::Result<File> {
    create_parent(path)?;
    let file = File::create(path.with_extension("lock"))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            tracing::info!(path = %path.display(), "waiting for another process that tests this GPU's kernels");
            file.lock().map(|()| file)
        }
        Err(TryLockError::Error(failure)) => Err(failure),
    }
}

fn create_parent(path: &Path) -> std::io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))
}
