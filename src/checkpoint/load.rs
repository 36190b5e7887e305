//! [`Checkpoint`]: opening, verifying and reading what was saved.

use super::CheckpointError;
use super::directory::step_directories;
use super::manifest::{Manifest, UnitEntry};
use super::save::{all_or_refused, gather_results};
use super::state_file::StateFile;
use crate::comm::ProcessGroup;
use crate::model::HfSource;
use crate::zero::FlatLayout;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A checkpoint with a sound manifest.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    dir: PathBuf,
    manifest: Manifest,
    layouts: Vec<FlatLayout>,
}

impl Checkpoint {
    /// Reads a checkpoint's manifest.
    ///
    /// # Errors
    /// As [`Manifest::read`].
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(dir)?;
        Ok(Self { dir: dir.to_owned(), layouts: manifest.layouts(), manifest })
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The same checkpoint with the files of the model directory that its run started from. Checkpoints of earlier
    /// versions lack them.
    #[must_use]
    pub fn with_source(mut self, source: HfSource) -> Self {
        self.manifest.source = Some(source);
        self
    }

    /// The units in the partitions of this checkpoint.
    pub fn layouts(&self) -> &[FlatLayout] {
        &self.layouts
    }

    /// Reads every file and compares size, header and hash with the manifest.
    ///
    /// # Errors
    /// The first file that is missing or is not what was written, with the tensor at fault
    /// where one is.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.verify_share(0, 1)
    }

    /// As [`verify`](Self::verify), every `of`-th file from `first` on.
    fn verify_share(&self, first: usize, of: usize) -> Result<(), CheckpointError> {
        self.manifest.files.iter().skip(first).step_by(of).try_for_each(|entry| {
            StateFile::open(&self.dir, &self.manifest, &self.layouts, entry)?.verify(entry)
        })
    }

    /// Refuses a checkpoint of other units or of other kinds of state.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`], which names the first difference.
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
            return mismatch(&format!("parameter {index} of `ulysses.model`"), show(&saved), show(&wanted));
        }
        if units.len() != self.manifest.units.len() {
            let (saved, wanted) = (self.manifest.units.len(), units.len());
            return mismatch("the number of units of `ulysses.model`", saved.to_string(), wanted.to_string());
        }
        if self.manifest.kinds != kinds {
            let saved = self.manifest.kinds.join(", ");
            return mismatch("the state that `optimizer` keeps", saved, kinds.join(", "));
        }
        Ok(())
    }

    /// A reader of its tensors, which opens a file when it first needs it.
    pub fn reader(&self) -> Reader<'_> {
        Reader { checkpoint: self, files: HashMap::new() }
    }
}

/// The first parameter that is frozen on one side only, and whether that is the first side.
fn differently_frozen<'a>(saved: &'a [UnitEntry], wanted: &'a [UnitEntry]) -> Option<(&'a str, bool)> {
    let flat = |units: &'a [UnitEntry]| {
        let of_unit = |unit: &'a UnitEntry| unit.parameters.iter().map(|p| (p.name.as_str(), unit.frozen));
        units.iter().flat_map(of_unit)
    };
    let wanted: HashMap<_, _> = flat(wanted).collect();
    flat(saved).find(|(name, frozen)| wanted.get(name).is_some_and(|wanted| wanted != frozen))
}

/// Reads ranges of a checkpoint's flat buffers, whatever partitions they lie in.
#[derive(Debug)]
pub struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    /// By index of the kind, and partition.
    files: HashMap<(usize, usize), StateFile>,
}

impl Reader<'_> {
    /// Reads elements `range` of a unit's flat buffer, padding excluded. Only these bytes, and
    /// the headers of the files that hold them, are read.
    ///
    /// # Errors
    /// A file that cannot be read or is not what the manifest calls for.
    ///
    /// # Panics
    /// When there is no such unit or kind, or `out` is not as long as `range`.
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
            let held = layout.partition(partition);
            let end = range.end.min(held.end);
            let part = &mut out[start - range.start..end - range.start];
            self.state_file(kind, partition)?.read(
                layout.name(),
                start - held.start..end - held.start,
                part,
            )?;
            start = end;
        }
        Ok(())
    }

    /// One parameter of one kind of state, whole.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Panics
    /// When there is no such unit, kind or parameter.
    pub fn parameter(
        &mut self,
        place: (usize, usize),
        parameter: usize,
    ) -> Result<Vec<f32>, CheckpointError> {
        let range = self.checkpoint.layouts[place.0].parameters()[parameter].range();
        let mut elements = vec![0.0; range.len()];
        self.read(place, range, &mut elements)?;
        Ok(elements)
    }

    fn state_file(&mut self, kind: usize, partition: usize) -> Result<&mut StateFile, CheckpointError> {
        let Checkpoint { dir, manifest, layouts } = self.checkpoint;
        match self.files.entry((kind, partition)) {
            std::collections::hash_map::Entry::Occupied(open) => Ok(open.into_mut()),
            std::collections::hash_map::Entry::Vacant(place) => {
                let name = super::file_name(&manifest.kinds[kind], partition, manifest.num_partitions);
                let Some(entry) = manifest.files.iter().find(|file| file.name == name) else {
                    unreachable!("a manifest that was read names a file for every partition and kind")
                };
                Ok(place.insert(StateFile::open(dir, manifest, layouts, entry)?))
            }
        }
    }
}

/// What [`newest`] came to.
#[derive(Debug)]
pub struct NewestCheckpoint {
    /// The newest checkpoint that verifies; none when there is no checkpoint at all.
    pub checkpoint: Option<Checkpoint>,
    /// What is wrong with those that are newer.
    pub refused: Vec<String>,
}

/// Opens and verifies a checkpoint together: each rank reads its share of the files. All ranks
/// get the same answer. Collective over `group`.
///
/// # Errors
/// [`CheckpointError::Refused`] with the first rank that found a fault, or failed
/// communication.
pub fn open_verified(dir: &Path, group: &dyn ProcessGroup) -> Result<Checkpoint, CheckpointError> {
    let opened = Checkpoint::open(dir).and_then(|checkpoint| {
        checkpoint.verify_share(group.rank(), group.world_size())?;
        Ok(checkpoint)
    });
    let answer = opened.as_ref().map(|_| ()).map_err(ToString::to_string);
    all_or_refused(gather_results(group, &answer)?)?;
    opened
}

/// The newest checkpoint of a directory that verifies. `latest` is not asked: what verifies is
/// known better by looking. Collective over `group`.
///
/// # Errors
/// [`CheckpointError::NoneVerifies`] when there are checkpoints and all are damaged, or failed
/// communication.
pub fn newest(directory: &Path, group: &dyn ProcessGroup) -> Result<NewestCheckpoint, CheckpointError> {
    // The first rank's list: directories change, and all ranks must look at the same steps.
    let listed = if group.rank() == 0 { step_directories(directory) } else { Ok(Vec::new()) };
    let listed =
        all_or_refused(gather_results(group, &listed.map_err(|error| error.to_string()))?)?.swap_remove(0);
    let mut faults = Vec::new();
    for found in listed {
        match open_verified(&directory.join(found.name), group) {
            Ok(checkpoint) => return Ok(NewestCheckpoint { checkpoint: Some(checkpoint), refused: faults }),
            Err(CheckpointError::Refused { reason, .. }) => faults.push(reason),
            Err(other) => return Err(other),
        }
    }
    match faults.first() {
        None => Ok(NewestCheckpoint { checkpoint: None, refused: faults }),
        Some(newest) => {
            Err(CheckpointError::NoneVerifies { directory: directory.to_owned(), newest: newest.clone() })
        }
    }
}
