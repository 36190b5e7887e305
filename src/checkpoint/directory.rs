//! The directory that a run's checkpoints lie in, and how one appears there or vanishes.
//!
//! What is being made or removed has a name that begins with a dot, so a name `step_…` never
//! means half a checkpoint: it comes and goes by a rename.

use super::manifest::Manifest;
use super::{CheckpointError, Storage};
use crate::regular_file;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Name of the file that names the newest checkpoint. It is a hint for people and scripts;
/// nothing here reads it, so it cannot mislead a resuming run.
pub const LATEST: &str = "latest";

/// Name of the file that names the checkpoint with the lowest evaluation loss (`keep_best`): a hint like [`LATEST`].
pub const BEST: &str = "best";

const STEP_PREFIX: &str = "step_";

/// The most bytes read of a file that names a checkpoint.
const MAX_POINTER_BYTES: u64 = 64;

/// Name of the directory of a step's checkpoint.
pub fn step_name(step: u64) -> String {
    format!("{STEP_PREFIX}{step:08}")
}

/// The checkpoint that a file like [`LATEST`] or [`BEST`] names, which lies beside it. `None` for anything else.
pub fn read_pointer(path: &Path) -> Option<PathBuf> {
    let (file, _) = regular_file::open(path).ok()?;
    let mut text = String::new();
    file.take(MAX_POINTER_BYTES).read_to_string(&mut text).ok()?;
    Some(path.with_file_name(step_name(step_of(text.trim_end())?)))
}

/// The steps that have a directory, newest first. Links are no directories of ours.
///
/// # Errors
/// A directory that cannot be listed. What is no directory has no steps.
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

/// The directory of a checkpoint, or of what is left of one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepDirectory {
    /// The step that its manifest states; the one that its name stands for where the manifest cannot be read.
    pub step: u64,
    /// Its name.
    pub name: String,
}

impl StepDirectory {
    /// Whether somebody has given it the name of another step.
    pub fn is_renamed(&self) -> bool {
        self.name != step_name(self.step)
    }
}

/// The directories that [`saved_steps`] finds, newest first by what their manifests state: a directory that was renamed, or
/// copied under another name, is as old as it ever was.
///
/// # Errors
/// As [`saved_steps`].
pub fn step_directories(directory: &Path) -> Result<Vec<StepDirectory>, CheckpointError> {
    let of = |step| {
        let name = step_name(step);
        // One that is damaged stays where its name puts it, to be reported in its turn.
        let stated = Manifest::read(&directory.join(&name)).map_or(step, |manifest| manifest.progress.step);
        StepDirectory { step: stated, name }
    };
    let mut directories: Vec<StepDirectory> = saved_steps(directory)?.into_iter().map(of).collect();
    directories.sort_by_key(|directory| (Reverse(directory.step), directory.is_renamed()));
    Ok(directories)
}

/// The step that a directory's name stands for.
fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix(STEP_PREFIX)?.parse().ok()?;
    (name == step_name(step)).then_some(step)
}

/// One output directory on one storage.
#[derive(Debug, Clone)]
pub(super) struct StepDirectories {
    pub(super) path: PathBuf,
    pub(super) storage: std::sync::Arc<dyn Storage>,
}

impl StepDirectories {
    pub(super) fn of(&self, step: u64) -> PathBuf {
        self.path.join(step_name(step))
    }

    /// Where a step is written before it is published.
    pub(super) fn unpublished(&self, step: u64) -> PathBuf {
        self.hidden(step, "saving")
    }

    fn hidden(&self, step: u64, state: &str) -> PathBuf {
        self.path.join(format!(".{}.{state}", step_name(step)))
    }

    /// Makes an empty directory to write a step in.
    pub(super) fn begin(&self, step: u64) -> Result<(), CheckpointError> {
        let path = self.unpublished(step);
        self.remove_if_there(&path)?;
        self.storage.create_dir(&path).map_err(CheckpointError::io("create", &path))
    }

    /// Gives up a step that was begun. There is nothing to do about a failure: the next run
    /// removes what is left.
    pub(super) fn abandon(&self, step: u64) {
        let _ = self.remove_if_there(&self.unpublished(step));
    }

    /// Writes the manifest into a step that is otherwise complete, and gives it its name. A checkpoint of another step
    /// that somebody has given this name is moved aside.
    pub(super) fn publish(&self, step: u64, manifest: &str) -> Result<(), CheckpointError> {
        let (from, to) = (self.unpublished(step), self.of(step));
        self.write_file(&from.join(super::manifest::MANIFEST), manifest)?;
        self.sync(&from)?;
        if let Ok(other) = Manifest::read(&to)
            && other.progress.step != step
        {
            self.rename(&to, &self.free_name(&format!("moved_{}", step_name(other.progress.step))))?;
        }
        // A checkpoint of this step that does not verify, or the run would have gone on from it.
        let replaced = self.hidden(step, "replaced");
        if to.symlink_metadata().is_ok() {
            self.remove_if_there(&replaced)?;
            self.rename(&to, &replaced)?;
        }
        self.rename(&from, &to)?;
        self.sync(&self.path)?;
        self.remove_if_there(&replaced)
    }

    /// `name`, or the first of `name.1`, `name.2` and so on that nothing has.
    fn free_name(&self, name: &str) -> PathBuf {
        let names = (0_u64..).map(|n| if n == 0 { name.to_owned() } else { format!("{name}.{n}") });
        let mut paths = names.map(|name| self.path.join(name));
        paths
            .find(|path| path.symlink_metadata().is_err())
            .unwrap_or_else(|| unreachable!("names do not end"))
    }

    /// Points a file, [`LATEST`] or [`BEST`], to a step.
    pub(super) fn write_pointer(&self, name: &str, step: u64) -> Result<(), CheckpointError> {
        let unpublished = self.path.join(format!(".{name}.saving"));
        self.write_file(&unpublished, &format!("{}\n", step_name(step)))?;
        self.rename(&unpublished, &self.path.join(name))?;
        self.sync(&self.path)
    }

    /// Removes all but the newest `keep` of the steps up to `verified`, which must be one that
    /// has been verified: it always stays, and what is newer than it is not ours to judge. Nor is a directory whose
    /// manifest states another step than its name: somebody has put it there. A damaged one takes no other's place, and
    /// `best` stays in addition to those `keep`.
    pub(super) fn prune(&self, verified: u64, keep: usize, best: Option<u64>) -> Result<(), CheckpointError> {
        let mut kept = 0;
        let is_ours = |step: &u64| *step <= verified && Some(*step) != best;
        for step in saved_steps(&self.path)?.into_iter().filter(is_ours) {
            let is_sound = match Manifest::read(&self.of(step)) {
                Ok(manifest) if manifest.progress.step != step => continue,
                Ok(_) => true,
                Err(_) => false,
            };
            if kept < keep.max(1) {
                kept += usize::from(is_sound);
                continue;
            }
            let removed = self.hidden(step, "removed");
            self.remove_if_there(&removed)?;
            self.rename(&self.of(step), &removed)?;
            self.remove_if_there(&removed)?;
        }
        Ok(())
    }

    /// Removes what earlier runs left half-made or half-removed. Only the job that owns the
    /// directory may call it.
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

    fn remove_if_there(&self, path: &Path) -> Result<(), CheckpointError> {
        match self.storage.remove_dir_all(path) {
            Err(error) if error.kind() == NotFound => Ok(()),
            removed => removed.map_err(CheckpointError::io("remove", path)),
        }
    }
}
