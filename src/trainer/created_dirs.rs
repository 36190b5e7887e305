//! Directories that are created before a run begins.

use std::io;
use std::path::{Path, PathBuf};

/// What was created for a run. Unless the run begins, and so [keeps](Self::keep) it, it is removed again.
#[derive(Debug, Default)]
pub struct CreatedDirs(Vec<PathBuf>);

impl CreatedDirs {
    /// Creates a directory with those above it, as far as they are not there.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn create(&mut self, directory: &Path) -> io::Result<()> {
        let missing = directory.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let missing: Vec<PathBuf> = missing.map(Path::to_owned).collect();
        // Those above come first, also where one below them cannot be created.
        self.0.extend(missing.into_iter().rev());
        std::fs::create_dir_all(directory)
    }

    /// Leaves them where they are.
    pub fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for CreatedDirs {
    fn drop(&mut self) {
        for directory in self.0.iter().rev() {
            // What is not empty any more belongs to somebody else, and what could not be created is not there.
            let _ = std::fs::remove_dir(directory);
        }
    }
}
