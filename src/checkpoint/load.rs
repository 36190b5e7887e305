//! [`Checkpoint`]: opening, verifying and reading a checkpoint.

use super::CheckpointError;
use super::directory::step_directories;
use super::manifest::{FileEntry, Manifest, UnitEntry};
use super::save::{all_or_refused, gather_results};
use super::state_file::StateFile;
use crate::comm::ProcessGroup;
use crate::model::HfSource;
use crate::zero::FlatLayout;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An opened checkpoint, whose manifest is valid.
///
/// # Examples
///
/// ```no_run
/// use std::path::Path;
/// use ulysses::checkpoint::Checkpoint;
///
/// let checkpoint = Checkpoint::open(Path::new("runs/first/step_00000020"))?;
/// checkpoint.verify()?;
/// println!("step {}", checkpoint.manifest().progress.step);
/// # Ok::<(), ulysses::checkpoint::CheckpointError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Checkpoint {
    dir: PathBuf,
    manifest: Manifest,
    layouts: Vec<FlatLayout>,
}

impl Checkpoint {
    /// Opens a checkpoint by reading its manifest.
    ///
    /// # Errors
    /// Fails like [`Manifest::read`].
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(dir)?;
        Ok(Self { dir: dir.to_owned(), layouts: manifest.layouts(), manifest })
    }

    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Sets the source model files, which checkpoints of earlier versions lack.
    #[must_use]
    pub fn with_source(mut self, source: HfSource) -> Self {
        self.manifest.source = Some(source);
        self
    }

    /// Returns the layouts of the units, partitioned as in this checkpoint.
    pub fn layouts(&self) -> &[FlatLayout] {
        &self.layouts
    }

    /// Verifies size, header and hash of every file against the manifest.
    ///
    /// # Errors
    /// Returns an error about the first missing or damaged file, and the tensor if known.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.verify_share(0, 1)
    }

    /// Verifies every `step`-th file, starting with file `first`.
    fn verify_share(&self, first: usize, step: usize) -> Result<(), CheckpointError> {
        self.manifest.files.iter().skip(first).step_by(step).try_for_each(|entry| {
            StateFile::open(&self.dir, &self.manifest, &self.layouts, entry)?.verify(entry)
        })
    }

    /// Checks that the checkpoint has the given units and kinds of state.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Mismatch`] with the first difference.
    pub fn check_fits<'a>(
        &self,
        units: impl Iterator<Item = &'a FlatLayout>,
        kinds: &[&str],
    ) -> Result<(), CheckpointError> {
        let mismatch = |what: &str, saved: String, wanted: String| {
            let (path, what) = (self.dir.clone(), what.to_owned());
            Err(CheckpointError::Mismatch { path, what, saved, wanted })
        };
        let flat = |units: &[UnitEntry]| -> Vec<String> {
            let of_unit = |unit: &UnitEntry| {
                let name = unit.name.clone();
                let line = move |p: &super::ParameterEntry| format!("{} {:?} in {name}", p.name, p.shape);
                unit.parameters.iter().map(line).collect::<Vec<_>>()
            };
            units.iter().flat_map(of_unit).collect()
        };
        let units: Vec<UnitEntry> = units.map(UnitEntry::of).collect();
        if let Some((name, saved)) = differently_frozen(&self.manifest.units, &units) {
            let word = |frozen| if frozen { "frozen" } else { "trained" }.to_owned();
            return mismatch(&format!("parameter {name}"), word(saved), word(!saved));
        }
        let (wanted, saved) = (flat(&units), flat(&self.manifest.units));
        let differs = (0..saved.len().max(wanted.len())).find(|&index| saved.get(index) != wanted.get(index));
        if let Some(index) = differs {
            let show = |list: &[String]| list.get(index).cloned().unwrap_or_else(|| "none".into());
            let of_checkpoint =
                self.manifest.config.pointer("/ulysses/model").and_then(|model| model.as_str());
            let model =
                of_checkpoint.map_or_else(String::new, |model| format!(" (resume with its own, {model})"));
            let what = format!("parameter {index} of `ulysses.model`{model}");
            return mismatch(&what, show(&saved), show(&wanted));
        }
        if units.len() != self.manifest.units.len() {
            let (saved, wanted) = (self.manifest.units.len(), units.len());
            return mismatch("the number of units of `ulysses.model`", saved.to_string(), wanted.to_string());
        }
        if self.manifest.kinds != kinds {
            let saved = self.manifest.kinds.join(", ");
            return mismatch("the optimizer state (`optimizer.type`)", saved, kinds.join(", "));
        }
        Ok(())
    }

    /// Returns the indices of the files with the elements `range` of `(unit, kind)`. Units and kinds that the checkpoint
    /// lacks have none.
    pub fn files_with(manifest: &Manifest, ranges: &[((usize, usize), Range<usize>)]) -> BTreeSet<usize> {
        let layouts = manifest.layouts();
        let partitions = |(at, range): &((usize, usize), Range<usize>)| {
            let size = layouts.get(at.0).map_or(1, FlatLayout::partition_numel).max(1);
            range.start / size..range.end.div_ceil(size)
        };
        let is_in = |file: &FileEntry, item: &((usize, usize), Range<usize>)| {
            manifest.kinds.get(item.0.1) == Some(&file.kind)
                && item.0.0 < layouts.len()
                && partitions(item).contains(&file.partition)
        };
        let files = manifest.files.iter().enumerate();
        files
            .filter(|(_, file)| ranges.iter().any(|item| is_in(file, item)))
            .map(|(index, _)| index)
            .collect()
    }

    /// Returns a reader of the tensors, which opens files on demand.
    pub fn reader(&self) -> Reader<'_> {
        Reader { checkpoint: self, files: HashMap::new() }
    }
}

/// Returns the first parameter that is frozen on one side only, and whether it is frozen in `saved`.
fn differently_frozen<'a>(saved: &'a [UnitEntry], wanted: &'a [UnitEntry]) -> Option<(&'a str, bool)> {
    let flat = |units: &'a [UnitEntry]| {
        let of_unit = |unit: &'a UnitEntry| unit.parameters.iter().map(|p| (p.name.as_str(), unit.frozen));
        units.iter().flat_map(of_unit)
    };
    let wanted: HashMap<_, _> = flat(wanted).collect();
    flat(saved).find(|(name, frozen)| wanted.get(name).is_some_and(|wanted| wanted != frozen))
}

/// A reader of ranges of a checkpoint's flat buffers, across partitions.
#[derive(Debug)]
pub struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    /// Open files by (index of the kind, partition).
    files: HashMap<(usize, usize), StateFile>,
}

impl Reader<'_> {
    /// Reads elements `range` of a unit's flat buffer, without padding.
    ///
    /// It reads only these bytes and the headers of the files.
    ///
    /// # Errors
    /// Fails if a file cannot be read or does not match the manifest.
    ///
    /// # Panics
    /// Panics if the unit or kind does not exist, or the length of `out` is not that of `range`.
    pub fn read(
        &mut self,
        (unit, kind): (usize, usize),
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        assert_eq!(range.len(), out.len(), "the range fills the output");
        let layout = &self.checkpoint.layouts[unit];
        let mut start = range.start;
        while start < range.end {
            let partition = start / layout.partition_numel();
            let available = layout.partition(partition);
            let end = range.end.min(available.end);
            let part = &mut out[start - range.start..end - range.start];
            self.state_file(kind, partition)?.read(
                layout.name(),
                start - available.start..end - available.start,
                part,
            )?;
            start = end;
        }
        Ok(())
    }

    /// Reads one kind of state of a whole parameter. `at` is `(unit, kind)`.
    ///
    /// # Errors
    /// Fails like [`read`](Self::read).
    ///
    /// # Panics
    /// Panics if the unit, kind or parameter does not exist.
    pub fn parameter(&mut self, at: (usize, usize), parameter: usize) -> Result<Vec<f32>, CheckpointError> {
        let range = self.checkpoint.layouts[at.0].parameters()[parameter].range();
        let mut elements = vec![0.0; range.len()];
        self.read(at, range, &mut elements)?;
        Ok(elements)
    }

    fn state_file(&mut self, kind: usize, partition: usize) -> Result<&mut StateFile, CheckpointError> {
        let Checkpoint { dir, manifest, layouts } = self.checkpoint;
        match self.files.entry((kind, partition)) {
            std::collections::hash_map::Entry::Occupied(open) => Ok(open.into_mut()),
            std::collections::hash_map::Entry::Vacant(vacant) => {
                let name = super::file_name(&manifest.kinds[kind], partition, manifest.num_partitions);
                let Some(entry) = manifest.files.iter().find(|file| file.name == name) else {
                    unreachable!("a valid manifest has a file for every partition and kind")
                };
                Ok(vacant.insert(StateFile::open(dir, manifest, layouts, entry)?))
            }
        }
    }
}

/// The result of [`newest`].
#[derive(Debug)]
pub struct NewestCheckpoint {
    /// The newest valid checkpoint, or `None` if the directory has no checkpoints.
    pub checkpoint: Option<Checkpoint>,
    /// The errors of newer, damaged checkpoints.
    pub refused: Vec<String>,
}

/// Opens and verifies a checkpoint. Collective over `group`.
///
/// Each rank verifies its share of the files. All ranks get the same result.
///
/// # Errors
/// Returns [`CheckpointError::Refused`] with the first rank that failed. Also fails if communication fails.
pub fn open_verified(dir: &Path, group: &dyn ProcessGroup) -> Result<Checkpoint, CheckpointError> {
    let opened = open_share(dir, group);
    let local = opened.as_ref().map(|_| ()).map_err(ToString::to_string);
    all_or_refused(gather_results(group, &local)?)?;
    opened
}

/// Opens a checkpoint and verifies this rank's share of its files.
fn open_share(dir: &Path, group: &dyn ProcessGroup) -> Result<Checkpoint, CheckpointError> {
    let checkpoint = Checkpoint::open(dir)?;
    checkpoint.verify_share(group.rank(), group.world_size())?;
    Ok(checkpoint)
}

/// Finds the newest valid checkpoint of a directory. Collective over `group`.
///
/// It verifies the checkpoints themselves and does not read `latest`. Damaged ones are skipped. One that is newer than this
/// program or that cannot be read is not: the run would later save over it.
///
/// # Errors
/// Returns [`CheckpointError::NoneVerifies`] if all checkpoints are damaged, and [`CheckpointError::Unreadable`] if the newest
/// one that is not damaged cannot be read. Also fails if communication fails.
pub fn newest(directory: &Path, group: &dyn ProcessGroup) -> Result<NewestCheckpoint, CheckpointError> {
    // The first rank's list for all, because the directory may change meanwhile.
    let listed = if group.rank() == 0 { step_directories(directory) } else { Ok(Vec::new()) };
    let listed =
        all_or_refused(gather_results(group, &listed.map_err(|error| error.to_string()))?)?.swap_remove(0);
    let mut errors = Vec::new();
    for found in listed {
        let opened = open_share(&directory.join(found.name), group);
        let damage = match &opened {
            Ok(_) => Ok(None),
            Err(error) if error.is_damage() => Ok(Some(error.to_string())),
            Err(error) => Err(error.to_string()),
        };
        let damage = all_or_refused(gather_results(group, &damage)?).map_err(|error| match error {
            CheckpointError::Refused { rank, reason } => CheckpointError::Unreadable { rank, reason },
            other => other,
        })?;
        match damage.into_iter().flatten().next() {
            Some(reason) => errors.push(reason),
            None => return Ok(NewestCheckpoint { checkpoint: Some(opened?), refused: errors }),
        }
    }
    match errors.first() {
        None => Ok(NewestCheckpoint { checkpoint: None, refused: errors }),
        Some(newest) => {
            Err(CheckpointError::NoneVerifies { directory: directory.to_owned(), newest: newest.clone() })
        }
    }
}
