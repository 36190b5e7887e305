//! [`Saver`]: the collective protocol that saves a checkpoint.
//!
//! Collectives always run on the rank's own thread. With `background`, another thread writes the files from a copy
//! of the state. The ranks check after every step whether all threads have finished, and then publish. A backend
//! therefore need not allow calls from several threads.

use super::directory::{BEST, LATEST, StepDirectories};
use super::manifest::{FileEntry, Manifest};
use super::state_file::{StateFile, write_state_file};
use super::stored_layouts::StoredLayouts;
use super::{CheckpointError, Storage};
use crate::comm::{ProcessGroup, ProcessGroupExt, ReduceOp};
use crate::zero::{CheckpointPart, PartReplica, StateSlice, ZeroError, ZeroOptimizer};
use candle_core::{Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{JoinHandle, ScopedJoinHandle};
use std::time::Instant;
use ulysses_kernels::tensor::to_vec;

/// Options of a [`Saver`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SaveOptions {
    /// Number of checkpoints to keep; `None` keeps all.
    ///
    /// If set, each new checkpoint is read back and verified before an older one is removed. The best checkpoint
    /// ([`EvaluationSummary::best_checkpoint`](super::EvaluationSummary::best_checkpoint)) is kept in addition.
    pub keep_last: Option<usize>,
    /// Whether a thread writes the files from a copy while training continues.
    pub background: bool,
}

/// A published checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedCheckpoint {
    /// The step.
    pub step: u64,
    /// The directory.
    pub path: PathBuf,
    /// Total bytes of the files, without the manifest.
    pub bytes: u64,
    /// Seconds from the start of the save to its publication.
    pub seconds: f64,
    /// Failures that do not affect this checkpoint, such as failing to remove older ones.
    ///
    /// Empty except on the first rank of the group.
    pub warnings: Vec<String>,
}

/// One rank's part in saving.
///
/// All ranks of the group must call the collective methods in the same order.
#[derive(Debug)]
pub struct Saver {
    group: Arc<dyn ProcessGroup>,
    directories: StepDirectories,
    options: SaveOptions,
    /// The part of which this rank writes some files.
    part: PartReplica,
    pending: Option<PendingSave>,
}

/// A save in progress.
#[derive(Debug)]
struct PendingSave {
    manifest: Manifest,
    started: Instant,
    work: WriteState,
}

#[derive(Debug)]
enum WriteState {
    Done(WriteResult),
    /// The thread returns its copy of the state, which the rank's thread frees: memory is counted per thread.
    Running(JoinHandle<(PartitionState, WriteResult)>),
}

/// The files that a rank wrote, or its error.
pub(super) type WriteResult = Result<Vec<FileEntry>, String>;

/// A rank's partition by index of the kind, and by unit; the units that have nothing in it are left out.
pub(super) type PartitionState = Vec<(usize, Vec<StateSlice>)>;

impl Saver {
    /// Creates a saver for an existing `directory`, and removes partial checkpoints of earlier jobs. Collective.
    ///
    /// The job must hold the directory's lock. `group` has all ranks of the mesh and no other use; its first rank
    /// creates and publishes directories. `part` is what this rank has
    /// ([`TrainingGroups::part_replica`](crate::comm::TrainingGroups::part_replica)): its replicas share the kinds of state.
    ///
    /// # Errors
    /// Fails if a partial checkpoint cannot be removed, or communication fails.
    pub fn new(
        group: Arc<dyn ProcessGroup>,
        storage: Arc<dyn Storage>,
        directory: &Path,
        part: PartReplica,
        options: SaveOptions,
    ) -> Result<Self, CheckpointError> {
        let directories = StepDirectories { path: directory.to_owned(), storage };
        let cleaned = if group.rank() == 0 { directories.clean() } else { Ok(()) };
        all_or_refused(gather_results(&*group, &cleaned.map_err(|error| error.to_string()))?)?;
        Ok(Self { group, directories, options, part, pending: None })
    }

    /// Returns whether a save is in progress.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Starts a save, after finishing the previous one, whose result it returns. Collective.
    ///
    /// With `background` it returns after copying this rank's partition; otherwise after writing the rank's files.
    /// The saver fills in the files of `manifest`.
    ///
    /// # Errors
    /// Fails like [`finish`](Self::finish).
    pub fn begin(
        &mut self,
        state: &ZeroOptimizer,
        manifest: Manifest,
    ) -> Result<Option<SavedCheckpoint>, CheckpointError> {
        let previous = self.finish()?;
        let (started, step) = (Instant::now(), manifest.progress.step);
        let begun = if self.group.rank() == 0 { self.directories.begin(step) } else { Ok(()) };
        self.all_or_abandon(step, gather_results(&*self.group, &begun.map_err(|error| error.to_string()))?)?;
        let parts = self.own_kinds(state_parts(state));
        let work = match (parts.is_empty(), self.options.background) {
            (true, _) => WriteState::Done(Ok(Vec::new())),
            (false, true) => spawn(self.job(&manifest), &parts),
            (false, false) => WriteState::Done(self.job(&manifest).write(&parts)),
        };
        self.pending = Some(PendingSave { manifest, started, work });
        Ok(previous)
    }

    /// Keeps the kinds of state that this replica writes. All replicas have the same bytes, and decide alike.
    fn own_kinds(&self, parts: PartitionState) -> PartitionState {
        let bytes =
            |(_, units): &(usize, Vec<StateSlice>)| units.iter().map(|unit| unit.numel() as u64).sum();
        let writers = self.part.writers(&parts.iter().map(bytes).collect::<Vec<_>>());
        let own = parts.into_iter().zip(writers).filter(|(_, writer)| *writer == self.part.replica);
        own.map(|(kind, _)| kind).collect()
    }

    fn job(&self, manifest: &Manifest) -> WriteJob {
        WriteJob {
            storage: self.directories.storage.clone(),
            dir: self.directories.unpublished(manifest.progress.step),
            manifest: manifest.clone(),
            part: self.part.part,
            read_back: self.options.keep_last.is_some(),
        }
    }

    /// Finishes the save in progress if all ranks have written their files. Collective.
    ///
    /// # Errors
    /// Fails like [`finish`](Self::finish).
    pub fn poll(&mut self) -> Result<Option<SavedCheckpoint>, CheckpointError> {
        let Some(pending) = &self.pending else { return Ok(None) };
        let finished = match &pending.work {
            WriteState::Done(_) => 1,
            WriteState::Running(thread) => i64::from(thread.is_finished()),
        };
        let all_finished = self.group.all_reduce_values(&[finished], ReduceOp::Min)?[0] == 1;
        if all_finished { self.finish() } else { Ok(None) }
    }

    /// Waits for the save in progress, if any, and publishes it. Collective.
    ///
    /// # Errors
    /// Returns the same [`CheckpointError::NotSaved`] on all ranks if one rank failed. Its files are removed and
    /// training may continue. Also fails if communication fails.
    pub fn finish(&mut self) -> Result<Option<SavedCheckpoint>, CheckpointError> {
        let Some(PendingSave { mut manifest, started, work }) = self.pending.take() else { return Ok(None) };
        let step = manifest.progress.step;
        let written = match work {
            WriteState::Done(outcome) => outcome,
            WriteState::Running(thread) => match thread.join() {
                Ok((_snapshot, outcome)) => outcome,
                Err(_) => Err("the checkpoint thread panicked".into()),
            },
        };
        let outcomes = gather_results(&*self.group, &written)?;
        manifest.files = self.all_or_abandon(step, outcomes)?.into_iter().flatten().collect();
        let bytes = manifest.total_bytes();
        let published = if self.group.rank() == 0 { self.publish(&manifest) } else { Ok(Vec::new()) };
        let outcomes = gather_results(&*self.group, &published.map_err(|error| error.to_string()))?;
        let warnings = self.all_or_abandon(step, outcomes)?.swap_remove(0);
        let warnings = if self.group.rank() == 0 { warnings } else { Vec::new() };
        let (path, seconds) = (self.directories.of(step), started.elapsed().as_secs_f64());
        Ok(Some(SavedCheckpoint { step, path, bytes, seconds, warnings }))
    }

    /// Writes the manifest, publishes the directory and removes old checkpoints. Runs on the first rank.
    fn publish(&self, manifest: &Manifest) -> Result<Vec<String>, CheckpointError> {
        let (step, directories) = (manifest.progress.step, &self.directories);
        let text = manifest.to_text().map_err(|error| CheckpointError::Manifest {
            path: directories.unpublished(step),
            reason: format!("cannot be written: {error}"),
        })?;
        directories.publish(step, &text)?;
        let best = manifest.progress.evaluations.best_checkpoint.map(|best| best.step);
        let latest = directories.write_pointer(LATEST, step);
        let pointed = best.map_or(Ok(()), |best| directories.write_pointer(BEST, best));
        // Pruning comes last: the pointers must not name a removed checkpoint.
        let pruned = self.options.keep_last.map_or(Ok(()), |keep| directories.prune(step, keep, best));
        let tidied = [latest, pointed, pruned];
        Ok(tidied.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect())
    }

    /// Returns the values of all ranks, or removes the step and returns the first failure.
    fn all_or_abandon<T>(
        &self,
        step: u64,
        outcomes: Vec<Result<T, String>>,
    ) -> Result<Vec<T>, CheckpointError> {
        let values: Result<Vec<T>, CheckpointError> = all_or_refused(outcomes);
        values.map_err(|error| {
            if self.group.rank() == 0 {
                self.directories.abandon(step);
            }
            // A rank that exits at once would fail the group, perhaps before the first rank has this result.
            let _ = self.group.barrier();
            match error {
                CheckpointError::Refused { rank, reason } => CheckpointError::NotSaved { step, rank, reason },
                other => other,
            }
        })
    }
}

/// A job that writes the files of one part.
pub(super) struct WriteJob {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) dir: PathBuf,
    pub(super) manifest: Manifest,
    pub(super) part: CheckpointPart,
    pub(super) read_back: bool,
}

impl WriteJob {
    /// Writes the files of all kinds in parallel: one file waits for the disk while another is hashed.
    pub(super) fn write(&self, partition: &PartitionState) -> WriteResult {
        std::thread::scope(|scope| {
            // Start all threads before waiting for the first.
            let threads: Vec<_> = partition
                .iter()
                .map(|(kind, units)| {
                    let kind = &self.manifest.kinds[*kind];
                    let run = move || self.write_kind(kind, units).map_err(|error| error.to_string());
                    let thread = std::thread::Builder::new().name(format!("checkpoint-{kind}"));
                    thread.spawn_scoped(scope, run).map_err(|error| format!("cannot start a thread: {error}"))
                })
                .collect();
            let join = |thread: Result<ScopedJoinHandle<'_, _>, String>| match thread?.join() {
                Ok(written) => written,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            threads.into_iter().map(join).collect()
        })
    }

    fn write_kind(&self, kind: &str, units: &[StateSlice]) -> Result<FileEntry, CheckpointError> {
        let (dir, manifest) = (&self.dir, &self.manifest);
        let layouts = StoredLayouts::new(manifest);
        let entry = write_state_file(&*self.storage, dir, manifest, &layouts, kind, self.part, units)?;
        if self.read_back {
            StateFile::open(dir, manifest, &layouts, &entry)?.verify(entry.bytes, &entry.blake3)?;
        }
        Ok(entry)
    }
}

/// Writes from a copy, in a thread.
fn spawn(job: WriteJob, parts: &PartitionState) -> WriteState {
    let copy = |part: &StateSlice| -> Result<StateSlice, ZeroError> {
        let tensor = part.tensor()?;
        Ok(StateSlice::whole(Tensor::from_vec(to_vec::<f32>(&tensor)?, tensor.shape(), &Device::Cpu)?))
    };
    let copy_kind = |(kind, units): &(usize, Vec<StateSlice>)| {
        Ok((*kind, units.iter().map(copy).collect::<Result<_, ZeroError>>()?))
    };
    let copies: PartitionState = match parts.iter().map(copy_kind).collect() {
        Ok(copies) => copies,
        Err(error) => return WriteState::Done(Err(ZeroError::to_string(&error))),
    };
    let name = format!("checkpoint-{}", job.part.partition);
    let run = move || {
        let outcome = job.write(&copies);
        (copies, outcome)
    };
    match std::thread::Builder::new().name(name).spawn(run) {
        Ok(thread) => WriteState::Running(thread),
        Err(error) => WriteState::Done(Err(format!("cannot start a thread: {error}"))),
    }
}

/// Returns what checkpoints have of this rank's partition, without copying.
pub(super) fn state_parts(state: &ZeroOptimizer) -> PartitionState {
    (0..state.state_kinds().len()).map(|kind| (kind, state.saved_parts(kind).collect())).collect()
}

/// All-gathers the ranks' results.
pub(super) fn gather_results<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    local: &Result<T, String>,
) -> Result<Vec<Result<T, String>>, CheckpointError> {
    let text = serde_json::to_vec(local).unwrap_or_else(|error| error.to_string().into_bytes());
    let parse = |text: Vec<u8>| {
        serde_json::from_slice(&text).unwrap_or_else(|error| Err(format!("sent an invalid result: {error}")))
    };
    Ok(group.all_gather_varied(&text)?.into_iter().map(parse).collect())
}

/// Returns all values, or [`CheckpointError::Refused`] with the first failed rank.
pub(super) fn all_or_refused<T>(outcomes: Vec<Result<T, String>>) -> Result<Vec<T>, CheckpointError> {
    let refuse = |(rank, outcome): (usize, Result<T, String>)| {
        outcome.map_err(|reason| CheckpointError::Refused { rank, reason })
    };
    outcomes.into_iter().enumerate().map(refuse).collect()
}
