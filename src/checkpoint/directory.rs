//! The output directory of a run: its checkpoints appear and disappear atomically.
//!
//! A checkpoint that is being written or removed has a hidden name. Renames publish and retire it, so a
//! directory `step_…` is never partial.

use super::manifest::Manifest;
use super::{CheckpointError, Storage};
use crate::regular_file;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Name of the file that points to the newest checkpoint.
///
/// It is for users and scripts. Resuming without an explicit path does not read it.
pub const LATEST: &str = "latest";

/// Name of the file that points to the checkpoint with the lowest evaluation loss (`keep_best`).
pub const BEST: &str = "best";

const STEP_PREFIX: &str = "step_";

/// Maximum number of bytes read from a pointer file.
const MAX_POINTER_BYTES: u64 = 64;

/// Returns the directory name of a step's checkpoint.
pub fn step_name(step: u64) -> String {
    format!("{STEP_PREFIX}{step:08}")
}

/// Returns the checkpoint that a file such as [`LATEST`] or [`BEST`] points to, in the same directory.
///
/// Returns `None` if the file is not such a pointer.
pub fn read_pointer(path: &Path) -> Option<PathBuf> {
    let (file, _) = regular_file::open(path).ok()?;
    let mut text = String::new();
    file.take(MAX_POINTER_BYTES).read_to_string(&mut text).ok()?;
    Some(path.with_file_name(step_name(step_of(text.trim_end())?)))
}

/// Returns the steps that have a checkpoint directory, newest first. Symbolic links are ignored.
///
/// The result is empty if `directory` is missing or not a directory.
///
/// # Errors
/// Fails if the directory cannot be listed.
pub fn saved_steps(directory: &Path) -> Result<Vec<u64>, CheckpointError> {
    let io = || CheckpointError::io("list", directory);
    let entries = match std::fs::read_dir(directory) {
        Err(error) if [NotFound, NotADirectory].contains(&error.kind()) => return Ok(Vec::new()),
        entries => entries.map_err(io())?,
    };
    let mut steps = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io())?;
        let step = entry.file_name().to_str().and_then(step_of);
        if let Some(step) = step
            && entry.file_type().map_err(io())?.is_dir()
        {
            steps.push(step);
        }
    }
    steps.sort_unstable_by(|a, b| b.cmp(a));
    Ok(steps)
}

/// The directory of a checkpoint, possibly damaged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepDirectory {
    /// The step in its manifest, or the step in its name if the manifest cannot be read.
    pub step: u64,
    /// The directory's name.
    pub name: String,
}

impl StepDirectory {
    /// Returns whether the directory has the name of another step.
    pub fn is_renamed(&self) -> bool {
        self.name != step_name(self.step)
    }
}

/// Returns the checkpoint directories, newest first by the step in their manifests.
///
/// A renamed or copied directory keeps the step of its manifest.
///
/// # Errors
/// Fails like [`saved_steps`].
pub fn step_directories(directory: &Path) -> Result<Vec<StepDirectory>, CheckpointError> {
    let of = |step| {
        let name = step_name(step);
        // A damaged checkpoint is sorted by its name, so that it is reported.
        let stated = Manifest::read(&directory.join(&name)).map_or(step, |manifest| manifest.progress.step);
        StepDirectory { step: stated, name }
    };
    let mut directories: Vec<StepDirectory> = saved_steps(directory)?.into_iter().map(of).collect();
    directories.sort_by_key(|directory| (Reverse(directory.step), directory.is_renamed()));
    Ok(directories)
}

/// Returns the step in a directory's name.
fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix(STEP_PREFIX)?.parse().ok()?;
    (name == step_name(step)).then_some(step)
}

/// The output directory and its storage.
#[derive(Debug, Clone)]
pub(super) struct StepDirectories {
    pub(super) path: PathBuf,
    pub(super) storage: std::sync::Arc<dyn Storage>,
}

impl StepDirectories {
    pub(super) fn of(&self, step: u64) -> PathBuf {
        self.path.join(step_name(step))
    }

    /// Returns the path where a step is written before it is published.
    pub(super) fn unpublished(&self, step: u64) -> PathBuf {
        self.hidden(step, "saving")
    }

    fn hidden(&self, step: u64, state: &str) -> PathBuf {
        self.path.join(format!(".{}.{state}", step_name(step)))
    }

    /// Creates an empty directory for a step.
    pub(super) fn begin(&self, step: u64) -> Result<(), CheckpointError> {
        let path = self.unpublished(step);
        self.remove_if_there(&path)?;
        self.storage.create_dir(&path).map_err(CheckpointError::io("create", &path))
    }

    /// Removes an unpublished step. Failures are ignored: the next run removes leftovers.
    pub(super) fn abandon(&self, step: u64) {
        let _ = self.remove_if_there(&self.unpublished(step));
    }

    /// Writes the manifest of a step whose other files are complete, and renames the step to its final name.
    ///
    /// A checkpoint of another step with this name is moved aside.
    pub(super) fn publish(&self, step: u64, manifest: &str) -> Result<(), CheckpointError> {
        let (from, to) = (self.unpublished(step), self.of(step));
        self.write_file(&from.join(super::manifest::MANIFEST), manifest)?;
        self.sync(&from)?;
        if let Ok(other) = Manifest::read(&to)
            && other.progress.step != step
        {
            self.rename(&to, &self.unused_path(&format!("moved_{}", step_name(other.progress.step))))?;
        }
        if to.symlink_metadata().is_ok_and(|metadata| !metadata.is_dir()) {
            self.move_aside(&to)?;
        }
        // An existing checkpoint of this step did not verify; otherwise the run would have resumed from it.
        let replaced = self.hidden(step, "replaced");
        if to.symlink_metadata().is_ok() {
            self.remove_if_there(&replaced)?;
            self.rename(&to, &replaced)?;
        }
        self.rename(&from, &to)?;
        self.sync(&self.path)?;
        self.remove_if_there(&replaced)
    }

    /// Returns the first unused path of `name`, `name.1`, `name.2`, ….
    fn unused_path(&self, name: &str) -> PathBuf {
        let names = (0_u64..).map(|n| if n == 0 { name.to_owned() } else { format!("{name}.{n}") });
        let mut paths = names.map(|name| self.path.join(name));
        paths
            .find(|path| path.symlink_metadata().is_err())
            .unwrap_or_else(|| unreachable!("names do not end"))
    }

    /// Points the file [`LATEST`] or [`BEST`] to a step.
    pub(super) fn write_pointer(&self, name: &str, step: u64) -> Result<(), CheckpointError> {
        let unpublished = self.path.join(format!(".{name}.saving"));
        self.write_file(&unpublished, &format!("{}\n", step_name(step)))?;
        let pointer = self.path.join(name);
        if pointer.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
            self.move_aside(&pointer)?;
        }
        self.rename(&unpublished, &pointer)?;
        self.sync(&self.path)
    }

    /// Removes all but the newest `keep` valid steps up to `verified`, a step that was just verified.
    ///
    /// Newer steps stay, as do directories whose manifest states another step than their name. A damaged
    /// checkpoint does not count towards `keep`. `best` stays in addition.
    pub(super) fn prune(&self, verified: u64, keep: usize, best: Option<u64>) -> Result<(), CheckpointError> {
        let mut kept = 0;
        let is_candidate = |step: &u64| *step <= verified && Some(*step) != best;
        for step in saved_steps(&self.path)?.into_iter().filter(is_candidate) {
            let is_valid = match Manifest::read(&self.of(step)) {
                Ok(manifest) if manifest.progress.step != step => continue,
                Ok(_) => true,
                Err(_) => false,
            };
            if kept < keep.max(1) {
                kept += usize::from(is_valid);
                continue;
            }
            self.remove(step)?;
        }
        Ok(())
    }

    /// Removes a step, which is never partial under its name.
    pub(super) fn remove(&self, step: u64) -> Result<(), CheckpointError> {
        let removed = self.hidden(step, "removed");
        self.remove_if_there(&removed)?;
        self.rename(&self.of(step), &removed)?;
        self.remove_if_there(&removed)
    }

    /// Removes partial checkpoints of earlier runs. The caller must hold the directory's lock.
    pub(super) fn clean(&self) -> Result<(), CheckpointError> {
        let io = || CheckpointError::io("list", &self.path);
        for entry in std::fs::read_dir(&self.path).map_err(io())? {
            let entry = entry.map_err(io())?;
            let name = entry.file_name();
            let stem = name.to_str().and_then(|name| name.strip_prefix('.')?.rsplit_once('.'));
            let is_ours = |(stem, state): (&str, &str)| {
                step_of(stem).is_some() && ["saving", "replaced", "removed"].contains(&state)
            };
            if stem.is_some_and(is_ours) {
                self.remove_if_there(&entry.path())?;
            }
        }
        Ok(())
    }

    fn write_file(&self, path: &Path, text: &str) -> Result<(), CheckpointError> {
        let mut file = self.storage.create(path).map_err(CheckpointError::io("create", path))?;
        file.write_all(text.as_bytes()).map_err(CheckpointError::io("write", path))?;
        file.sync().map_err(CheckpointError::io("fsync", path))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), CheckpointError> {
        self.storage.rename(from, to).map_err(CheckpointError::io("rename", from))
    }

    fn sync(&self, path: &Path) -> Result<(), CheckpointError> {
        self.storage.sync_dir(path).map_err(CheckpointError::io("fsync", path))
    }

    /// Renames what is not ours and in the way: `moved_NAME`.
    fn move_aside(&self, path: &Path) -> Result<(), CheckpointError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let moved = self.unused_path(&format!("moved_{}", name.trim_start_matches('.')));
        tracing::warn!("{} is in the way of a checkpoint: renamed to {}", path.display(), moved.display());
        self.rename(path, &moved)
    }

    fn remove_if_there(&self, path: &Path) -> Result<(), CheckpointError> {
        if path.symlink_metadata().is_ok_and(|metadata| !metadata.is_dir()) {
            return self.move_aside(path);
        }
        match self.storage.remove_dir_all(path) {
            Err(error) if error.kind() == NotFound => Ok(()),
            removed => removed.map_err(CheckpointError::io("remove", path)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::LocalStorage;

    #[test]
    fn what_is_in_the_way_of_a_checkpoint_is_moved_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let steps =
            StepDirectories { path: dir.path().to_owned(), storage: std::sync::Arc::new(LocalStorage) };
        for name in
            [".step_00000009.saving", ".step_00000009.replaced", "step_00000009", "moved_step_00000009"]
        {
            std::fs::write(path(name), name).unwrap();
        }
        std::fs::create_dir(path(LATEST)).unwrap();
        steps.begin(9).unwrap();
        steps.publish(9, "{}").unwrap();
        steps.write_pointer(LATEST, 9).unwrap();
        assert_eq!(read_pointer(&path(LATEST)), Some(steps.of(9)));
        assert!(path("moved_latest").is_dir() && steps.of(9).is_dir());
        for (name, content) in [
            ("moved_step_00000009", "moved_step_00000009"),
            ("moved_step_00000009.1", "step_00000009"),
            ("moved_step_00000009.saving", ".step_00000009.saving"),
        ] {
            assert_eq!(std::fs::read_to_string(path(name)).unwrap(), content);
        }
    }
}
