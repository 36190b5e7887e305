//! The directory in host memory in which the ranks of this machine copy their state (`checkpoint.memory_interval`).
//!
//! It outlives the ranks, so that the next start finds the copies, but not the job.

use super::processes::unique_text;
use anyhow::Context;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The environment variable of the ranks that names the directory.
pub(crate) const MEMORY_DIR_VARIABLE: &str = "ULYSSES_MEMORY_DIR";

/// A job's directory, removed on drop, and by the watchdog if `launch` is killed.
pub(super) struct MemoryDir {
    path: PathBuf,
    is_created: bool,
}

impl MemoryDir {
    /// Names a new directory in `parent`.
    pub(super) fn in_directory(parent: &Path) -> Self {
        Self { path: parent.join(format!("ulysses-{}", unique_text())), is_created: false }
    }

    /// Creates it, empty and for this user only.
    pub(super) fn create(&mut self) -> anyhow::Result<()> {
        DirBuilder::new().mode(0o700).create(&self.path).with_context(|| {
            let parent = self.path.parent().unwrap_or(&self.path).display();
            format!("--memory-dir {parent}: cannot create a directory for copies in memory")
        })?;
        self.is_created = true;
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for MemoryDir {
    fn drop(&mut self) {
        if self.is_created {
            // All ranks have ended.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
