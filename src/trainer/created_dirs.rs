//! Directories that are created before a run starts.

use std::io;
use std::path::{Path, PathBuf};

/// The directories that were created for a run. They are removed on drop, unless they are [kept](Self::keep).
#[derive(Debug, Default)]
pub struct CreatedDirs(Vec<PathBuf>);

impl CreatedDirs {
    /// Creates a directory and its missing parents.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn create(&mut self, directory: &Path) -> io::Result<()> {
        let missing = directory.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let missing: Vec<PathBuf> = missing.map(Path::to_owned).collect();
        // Parents come first, even if a child cannot be created.
        self.0.extend(missing.into_iter().rev());
        std::fs::create_dir_all(directory)
    }

    /// Creates a directory that must not exist, in one that does.
    ///
    /// # Errors
    /// An error of the operating system: `AlreadyExists` if the path is taken.
    pub fn create_new(&mut self, directory: &Path) -> io::Result<()> {
        std::fs::create_dir(directory)?;
        self.0.push(directory.to_owned());
        Ok(())
    }

    /// Keeps the directories.
    pub fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for CreatedDirs {
    fn drop(&mut self) {
        for directory in self.0.iter().rev() {
            // Fails for directories that are not empty any more, or could not be created.
            let _ = std::fs::remove_dir(directory);
        }
    }
}
