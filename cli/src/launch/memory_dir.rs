//! The directory in host memory in which the ranks of this machine copy their state (`checkpoint.memory_interval`).
//!
//! It outlives the ranks, so that the next start finds the copies, but not the job.

use super::watchdog::Watchdog;
use anyhow::Context;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The environment variable of the ranks that names the directory.
pub(crate) const MEMORY_DIR_VARIABLE: &str = "ULYSSES_MEMORY_DIR";

/// A job's directory, removed on drop, and by a watchdog if `launch` is killed.
pub(super) struct MemoryDir {
    path: PathBuf,
    /// Of its own, because the watchdog of the ranks ends with each start.
    _watchdog: Watchdog,
}

impl MemoryDir {
    /// Creates an empty directory in `parent` that only this user can read.
    pub(super) fn create(parent: &Path, grace: Duration) -> anyhow::Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let path = parent.join(format!("ulysses-{}-{:x}", std::process::id(), now.as_nanos()));
        let watchdog = Watchdog::start(grace, Some(&path))?;
        let made = DirBuilder::new().mode(0o700).create(&path);
        let refused =
            || format!("--memory-dir {}: cannot create a directory for copies in memory", parent.display());
        made.with_context(refused)?;
        Ok(Self { path, _watchdog: watchdog })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for MemoryDir {
    fn drop(&mut self) {
        // All ranks have ended.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
