//! [`Saver`]: how the ranks save a checkpoint together.
//!
//! Every collective is called on the rank's own thread. With `background` only the writing of
//! files moves to another thread, on a copy of the state; the ranks ask each other after every
//! step whether all have finished, and publish then. So a backend need not allow calls from
//! several threads.

use super::directory::{BEST, LATEST, StepDirectories};
use super::manifest::{FileEntry, Manifest};
use super::state_file::{StateFile, write_state_file};
use super::{CheckpointError, Storage};
use crate::comm::{ProcessGroup, ProcessGroupExt, ReduceOp};
use crate::zero::{KeptPart, ZeroError, ZeroOptimizer};
use candle_core::{Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{JoinHandle, ScopedJoinHandle};
use std::time::Instant;
use ulysses_kernels::tensor::to_vec;

/// How checkpoints are saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SaveOptions {
    /// Checkpoints to keep; all of them without a number. With one, each new checkpoint is
    /// read back and verified before an older one is removed. The best one by evaluation loss
    /// ([`EvaluationSummary::best_checkpoint`](super::EvaluationSummary::best_checkpoint)) stays beside them.
    pub keep_last: Option<usize>,
    /// Write from a copy, while training goes on.
    pub background: bool,
}

/// A checkpoint that was published.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedCheckpoint {
    /// Its step.
    pub step: u64,
    /// Its directory.
    pub path: PathBuf,
    /// Bytes of all its files but the manifest.
    pub bytes: u64,
    /// From the beginning of the save to its publication.
    pub seconds: f64,
    /// What did not work although the checkpoint is safe: removing older ones, for example.
    /// On the first rank of the group only.
    pub warnings: Vec<String>,
}

/// One rank's part in saving. All methods that are called collective are called by all ranks of
/// the group, in the same order.
#[derive(Debug)]
pub struct Saver {
    group: Arc<dyn ProcessGroup>,
    directories: StepDirectories,
    options: SaveOptions,
    /// The partition that this rank writes, if it writes one.
    partition: Option<usize>,
    pending: Option<PendingSave>,
}

/// A save that has been begun.
#[derive(Debug)]
struct PendingSave {
    manifest: Manifest,
    started: Instant,
    work: WriteState,
}

#[derive(Debug)]
enum WriteState {
    Done(WriteResult),
    /// The thread returns the copy that it wrote from, for the rank's thread to free: memory is
    /// counted by thread.
    Running(JoinHandle<(PartitionState, WriteResult)>),
}

/// The files that a rank wrote, or why it could not.
type WriteResult = Result<Vec<FileEntry>, String>;

/// A rank's partition by kind and unit; the units that have nothing in it are left out.
type PartitionState = Vec<Vec<KeptPart>>;

impl Saver {
    /// Makes checkpoints in `directory`, which exists and is this job's alone. `group` holds all
    /// ranks of the mesh and serves nothing else; its first rank creates and publishes.
    /// `partition` is the dp rank on the ranks with sp rank 0, which write, and nothing on the
    /// others: a partition is written once. Collective; removes what earlier jobs left
    /// half-made.
    ///
    /// # Errors
    /// Leftovers that cannot be removed, or failed communication.
    pub fn new(
        group: Arc<dyn ProcessGroup>,
        storage: Arc<dyn Storage>,
        directory: &Path,
        partition: Option<usize>,
        options: SaveOptions,
    ) -> Result<Self, CheckpointError> {
        let directories = StepDirectories { path: directory.to_owned(), storage };
        let cleaned = if group.rank() == 0 { directories.clean() } else { Ok(()) };
        all_or_refused(gather_results(&*group, &cleaned.map_err(|error| error.to_string()))?)?;
        Ok(Self { group, directories, options, partition, pending: None })
    }

    /// Whether a save has been begun and not completed.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Begins to save: with `background` it copies this rank's partition and returns, without
    /// it this rank's files are written when it returns. The `manifest` lacks its files.
    /// Returns what the save before came to, which is completed first. Collective.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn begin(
        &mut self,
        state: &ZeroOptimizer,
        manifest: Manifest,
    ) -> Result<Option<SavedCheckpoint>, CheckpointError> {
        let before = self.finish()?;
        let (started, step) = (Instant::now(), manifest.progress.step);
        let begun = if self.group.rank() == 0 { self.directories.begin(step) } else { Ok(()) };
        self.check(step, gather_results(&*self.group, &begun.map_err(|error| error.to_string()))?)?;
        let work = match self.partition {
            None => WriteState::Done(Ok(Vec::new())),
            Some(partition) => {
                let job = self.job(&manifest, partition);
                let parts = state_parts(state);
                if self.options.background { spawn(job, &parts) } else { WriteState::Done(job.write(&parts)) }
            }
        };
        self.pending = Some(PendingSave { manifest, started, work });
        Ok(before)
    }

    fn job(&self, manifest: &Manifest, partition: usize) -> WriteJob {
        WriteJob {
            storage: self.directories.storage.clone(),
            dir: self.directories.unpublished(manifest.progress.step),
            manifest: manifest.clone(),
            partition,
            read_back: self.options.keep_last.is_some(),
        }
    }

    /// Completes the save under way if all ranks have written their files. Collective.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn poll(&mut self) -> Result<Option<SavedCheckpoint>, CheckpointError> {
        let Some(pending) = &self.pending else { return Ok(None) };
        let finished = match &pending.work {
            WriteState::Done(_) => 1,
            WriteState::Running(thread) => i64::from(thread.is_finished()),
        };
        let all_finished = self.group.all_reduce_values(&[finished], ReduceOp::Min)?[0] == 1;
        if all_finished { self.finish() } else { Ok(None) }
    }

    /// Waits for the save under way, if there is one, and publishes it. Collective.
    ///
    /// # Errors
    /// [`CheckpointError::NotSaved`], the same on all ranks, when something failed on one of
    /// them: then no file is left and training may go on. Failed communication is another.
    pub fn finish(&mut self) -> Result<Option<SavedCheckpoint>, CheckpointError> {
        let Some(PendingSave { mut manifest, started, work }) = self.pending.take() else { return Ok(None) };
        let step = manifest.progress.step;
        let written = match work {
            WriteState::Done(outcome) => outcome,
            WriteState::Running(thread) => match thread.join() {
                Ok((_snapshot, outcome)) => outcome,
                Err(_) => Err("the thread that writes the checkpoint panicked".into()),
            },
        };
        let outcomes = gather_results(&*self.group, &written)?;
        manifest.files = self.check(step, outcomes)?.into_iter().flatten().collect();
        let bytes = manifest.total_bytes();
        let published = if self.group.rank() == 0 { self.publish(&manifest) } else { Ok(Vec::new()) };
        let outcomes = gather_results(&*self.group, &published.map_err(|error| error.to_string()))?;
        let warnings = self.check(step, outcomes)?.swap_remove(0);
        let warnings = if self.group.rank() == 0 { warnings } else { Vec::new() };
        let (path, seconds) = (self.directories.of(step), started.elapsed().as_secs_f64());
        Ok(Some(SavedCheckpoint { step, path, bytes, seconds, warnings }))
    }

    /// The first rank's part: the manifest, the rename, and what only tidies up.
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
        // Last: what the files named before is removed only when they name what stays.
        let pruned = self.options.keep_last.map_or(Ok(()), |keep| directories.prune(step, keep, best));
        let tidied = [latest, pointed, pruned];
        Ok(tidied.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect())
    }

    /// The ranks' values, or the first rank's failure, after which nothing is left on the disk.
    fn check<T>(&self, step: u64, outcomes: Vec<Result<T, String>>) -> Result<Vec<T>, CheckpointError> {
        let values: Result<Vec<T>, CheckpointError> = all_or_refused(outcomes);
        values.map_err(|error| {
            if self.group.rank() == 0 {
                self.directories.abandon(step);
            }
            // A rank that left at once with this error would fail the group, perhaps before the
            // first rank has heard of it.
            let _ = self.group.barrier();
            match error {
                CheckpointError::Refused { rank, reason } => CheckpointError::NotSaved { step, rank, reason },
                other => other,
            }
        })
    }
}

/// What writes one partition's files.
struct WriteJob {
    storage: Arc<dyn Storage>,
    dir: PathBuf,
    manifest: Manifest,
    partition: usize,
    read_back: bool,
}

impl WriteJob {
    /// Writes the file of every kind, all at once: while one waits for the disk, another is hashed.
    fn write(&self, partition: &PartitionState) -> WriteResult {
        std::thread::scope(|scope| {
            let files = self.manifest.kinds.iter().zip(partition);
            // All are started before the first is waited for.
            let threads: Vec<_> = files
                .map(|(kind, units)| {
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

    fn write_kind(&self, kind: &str, units: &[KeptPart]) -> Result<FileEntry, CheckpointError> {
        let (dir, manifest) = (&self.dir, &self.manifest);
        let entry = write_state_file(&*self.storage, dir, manifest, (kind, self.partition), units)?;
        if self.read_back {
            StateFile::open(dir, manifest, &manifest.layouts(), &entry)?.verify(&entry)?;
        }
        Ok(entry)
    }
}

/// Writes from a copy, in a thread.
fn spawn(job: WriteJob, parts: &PartitionState) -> WriteState {
    let copy = |part: &KeptPart| {
        let tensor = part.tensor()?;
        Ok(KeptPart::whole(Tensor::from_vec(to_vec::<f32>(&tensor)?, tensor.shape(), &Device::Cpu)?))
    };
    let copies = parts.iter().map(|units| units.iter().map(copy).collect()).collect();
    let copies: PartitionState = match copies {
        Ok(copies) => copies,
        Err(error) => return WriteState::Done(Err(ZeroError::to_string(&error))),
    };
    let name = format!("checkpoint-{}", job.partition);
    let run = move || {
        let outcome = job.write(&copies);
        (copies, outcome)
    };
    match std::thread::Builder::new().name(name).spawn(run) {
        Ok(thread) => WriteState::Running(thread),
        Err(error) => WriteState::Done(Err(format!("cannot start a thread: {error}"))),
    }
}

/// This rank's partition where it lies.
fn state_parts(state: &ZeroOptimizer) -> PartitionState {
    let (kinds, units) = (state.state_kinds().len(), state.layouts().count());
    let of_kind = |kind| (0..units).filter_map(move |unit| state.state_part(unit, kind));
    (0..kinds).map(|kind| of_kind(kind).collect()).collect()
}

/// Tells every rank what every rank has come to.
pub(super) fn gather_results<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    local: &Result<T, String>,
) -> Result<Vec<Result<T, String>>, CheckpointError> {
    let text = serde_json::to_vec(local).unwrap_or_else(|error| error.to_string().into_bytes());
    let parse = |text: Vec<u8>| {
        serde_json::from_slice(&text).unwrap_or_else(|error| Err(format!("sent no answer: {error}")))
    };
    Ok(group.all_gather_varied(&text)?.into_iter().map(parse).collect())
}

/// All values, or [`CheckpointError::Refused`] with the first rank that has none.
pub(super) fn all_or_refused<T>(outcomes: Vec<Result<T, String>>) -> Result<Vec<T>, CheckpointError> {
    let refuse = |(rank, outcome): (usize, Result<T, String>)| {
        outcome.map_err(|reason| CheckpointError::Refused { rank, reason })
    };
    outcomes.into_iter().enumerate().map(refuse).collect()
}
