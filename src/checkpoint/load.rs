//! [`Checkpoint`]: opening, verifying and reading a checkpoint.

use super::CheckpointError;
use super::directory::step_directories;
use super::manifest::Manifest;
use super::parameter_table::UnitEntry;
use super::save::{all_or_refused, gather_results};
use super::state_file::StateFile;
use super::stored_layouts::StoredLayouts;
use crate::comm::ProcessGroup;
use crate::model::HfSource;
use crate::zero::{CheckpointPart, FlatLayout, StateIndex};
use std::collections::{BTreeSet, HashMap, HashSet};
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
    stored: StoredLayouts,
}

impl Checkpoint {
    /// Opens a checkpoint by reading its manifest.
    ///
    /// # Errors
    /// Fails like [`Manifest::read`].
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(dir)?;
        let (layouts, stored) = (manifest.layouts(), StoredLayouts::new(&manifest));
        Ok(Self { dir: dir.to_owned(), manifest, layouts, stored })
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

    /// Returns the layouts of the units, with whole parameters.
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
            StateFile::open(&self.dir, &self.manifest, &self.stored, entry)?
                .verify(entry.bytes, &entry.blake3)
        })
    }

    /// Checks that the checkpoint has the given whole parameters and kinds of state. How they are divided into units, and over
    /// ranks, is free.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Mismatch`] with the first difference.
    pub fn check_fits(&self, units: &[UnitEntry], kinds: &[&str]) -> Result<(), CheckpointError> {
        let (saved, wanted) = (parameters(&self.manifest.units), parameters(units));
        let [of_saved, of_wanted] =
            [&saved, &wanted].map(|all| all.iter().copied().collect::<HashMap<_, _>>());
        let pairs = || {
            let names = saved.iter().chain(&wanted).map(|(name, _)| *name);
            names.map(|name| (name, of_saved.get(name), of_wanted.get(name)))
        };
        for (name, saved, wanted) in pairs() {
            let (Some((_, saved)), Some((_, wanted))) = (saved, wanted) else { continue };
            if saved != wanted {
                let word = |frozen: &bool| if *frozen { "frozen" } else { "trained" }.to_owned();
                return Err(self.mismatch(format!("parameter {name}"), word(saved), word(wanted)));
            }
        }
        if let Some((name, saved, wanted)) = pairs().find(|(_, saved, wanted)| saved != wanted) {
            let model = self.manifest.config.pointer("/ulysses/model").and_then(|model| model.as_str());
            let own = model.map_or_else(String::new, |model| format!(" (resume with its own, {model})"));
            let show = |parameter: Option<&(&[usize], bool)>| {
                parameter.map_or_else(|| "missing".to_owned(), |(shape, _)| format!("{shape:?}"))
            };
            let what = format!("parameter {name} of `ulysses.model`{own}");
            return Err(self.mismatch(what, show(saved), show(wanted)));
        }
        if self.manifest.kinds != kinds {
            let saved = self.manifest.kinds.join(", ");
            let what = "the optimizer state (`optimizer.type`)".to_owned();
            return Err(self.mismatch(what, saved, kinds.join(", ")));
        }
        Ok(())
    }

    fn mismatch(&self, what: String, saved: String, wanted: String) -> CheckpointError {
        CheckpointError::Mismatch { path: self.dir.clone(), what, saved, wanted }
    }

    /// Returns the indices of the files with elements of flat buffers: their layout in this run, the kind of state, the range.
    /// Parameters and kinds that the checkpoint lacks have none.
    pub fn files_with(manifest: &Manifest, ranges: &[(&FlatLayout, usize, Range<usize>)]) -> BTreeSet<usize> {
        let stored = StoredLayouts::new(manifest);
        let mut files = HashSet::new();
        for (layout, kind, range) in ranges {
            let Some(kind) = manifest.kinds.get(*kind) else { continue };
            for piece in stored.find(layout, range.clone()).unwrap_or_default() {
                files.extend(stored.cut(&piece).map(|(part, ..)| (kind, part)));
            }
        }
        let entries = manifest.files.iter().enumerate();
        let needed = entries.filter(|(_, file)| files.contains(&(&file.kind, file.part())));
        needed.map(|(index, _)| index).collect()
    }

    /// Returns a reader of the tensors, which opens files on demand.
    pub fn reader(&self) -> Reader<'_> {
        Reader { checkpoint: self, files: HashMap::new() }
    }
}

/// Returns the name of every parameter, its whole shape, and whether it is frozen.
fn parameters(units: &[UnitEntry]) -> Vec<(&str, (&[usize], bool))> {
    let of_units = units.iter().flat_map(|unit| unit.parameters.iter().map(|p| (p, unit.frozen)));
    of_units.map(|(p, frozen)| (p.name.as_str(), (p.shape.as_slice(), frozen))).collect()
}

/// A reader of ranges of flat buffers, from wherever the checkpoint has their elements.
#[derive(Debug)]
pub struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    /// Open files by index of the kind and part.
    files: HashMap<(usize, CheckpointPart), StateFile>,
}

impl Reader<'_> {
    /// Reads one kind of state of the elements `range`, without padding, of a flat buffer with the given layout. The
    /// parameters may be divided into buffers, partitions and shards in another way than in the checkpoint.
    ///
    /// It reads only these bytes and the headers of the files.
    ///
    /// # Errors
    /// Fails if a file cannot be read or does not match the manifest, or the checkpoint has no such parameter.
    ///
    /// # Panics
    /// Panics if the kind does not exist, or the length of `out` is not that of `range`.
    pub fn read(
        &mut self,
        layout: &FlatLayout,
        kind: usize,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        assert_eq!(range.len(), out.len(), "the range fills the output");
        let checkpoint = self.checkpoint;
        let pieces = checkpoint.stored.find(layout, range).map_err(|parameter| {
            let wanted = format!("{:?}", parameter.whole_shape());
            checkpoint.mismatch(format!("parameter {}", parameter.name), "another one".into(), wanted)
        })?;
        for piece in pieces {
            let unit = checkpoint.stored.tp_rank(piece.tp_rank)[piece.unit].name();
            for (part, elements, target) in checkpoint.stored.cut(&piece) {
                self.state_file(kind, part)?.read(unit, elements, &mut out[target])?;
            }
        }
        Ok(())
    }

    /// Reads one kind of state of a whole parameter, by its index within the unit.
    ///
    /// # Errors
    /// Fails like [`read`](Self::read).
    ///
    /// # Panics
    /// Panics if the unit, kind or parameter does not exist.
    pub fn parameter(
        &mut self,
        StateIndex { unit, kind }: StateIndex,
        parameter: usize,
    ) -> Result<Vec<f32>, CheckpointError> {
        let layout = &self.checkpoint.layouts[unit];
        let range = layout.parameters()[parameter].range();
        let mut elements = vec![0.0; range.len()];
        self.read(layout, kind, range, &mut elements)?;
        Ok(elements)
    }

    fn state_file(&mut self, kind: usize, part: CheckpointPart) -> Result<&mut StateFile, CheckpointError> {
        let Checkpoint { dir, manifest, stored, .. } = self.checkpoint;
        match self.files.entry((kind, part)) {
            std::collections::hash_map::Entry::Occupied(open) => Ok(open.into_mut()),
            std::collections::hash_map::Entry::Vacant(vacant) => {
                let name = manifest.file_name(&manifest.kinds[kind], part);
                let Some(entry) = manifest.files.iter().find(|file| file.name == name) else {
                    unreachable!("a valid manifest has a file for every part and kind")
                };
                Ok(vacant.insert(StateFile::open(dir, manifest, stored, entry)?))
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
