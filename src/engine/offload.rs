//! Checkpoints of layers in a file, between their forward and their backward pass.
//!
//! The file has no name and vanishes with its last handle. A thread writes while the layers go on; before
//! a backward pass needs a checkpoint, the same thread reads through it, so that the reader finds it in the
//! system's page cache, which no rank's memory pays for.

use super::EngineError;
use crate::ops::Workspace;
use crate::tensor::{with_slice, with_slice_mut};
use candle_core::{DType, Shape, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Tensors being written before [`CheckpointFile::store`] waits for one of them. Each is one hidden state more
/// that the forward pass holds.
const MAX_IN_FLIGHT: usize = 1;

/// What the thread reads at a time when it reads ahead.
pub(super) const READ_AHEAD_BYTES: usize = 1 << 20;

/// One rank's file of checkpoints.
pub(super) struct CheckpointFile {
    directory: PathBuf,
    file: Arc<File>,
    extents: Arc<Mutex<Extents>>,
    /// None only while the thread is told to end.
    jobs: Option<Sender<Job>>,
    written: Receiver<io::Result<Tensor>>,
    in_flight: usize,
    thread: Option<JoinHandle<()>>,
}

/// A tensor in the file. Dropping it frees its place.
pub(super) struct Stored {
    offset: u64,
    bytes: u64,
    shape: Shape,
    extents: Arc<Mutex<Extents>>,
}

/// The places of the file: sizes repeat from layer to layer and from step to step.
#[derive(Default)]
struct Extents {
    end: u64,
    free: HashMap<u64, Vec<u64>>,
}

enum Job {
    Write(Tensor, u64),
    ReadAhead { offset: u64, bytes: u64 },
}

impl CheckpointFile {
    /// Makes the file in `directory`, or where the system keeps temporary files.
    ///
    /// # Errors
    /// A directory that cannot be written to.
    pub(super) fn create(directory: Option<&Path>) -> Result<Self, EngineError> {
        let directory = directory.map_or_else(std::env::temp_dir, Path::to_owned);
        let failed = |source| EngineError::Offload { directory: directory.clone(), source };
        let file = Arc::new(tempfile::tempfile_in(&directory).map_err(failed)?);
        let (jobs, todo) = channel();
        let (done, written) = channel();
        let of_thread = file.clone();
        let work = move || todo.iter().try_for_each(|job| work(&of_thread, job, &done)).unwrap_or(());
        let name = "ulysses-offload".to_owned();
        let thread = std::thread::Builder::new().name(name).spawn(work).map_err(failed)?;
        let extents = Arc::default();
        let (jobs, thread) = (Some(jobs), Some(thread));
        Ok(Self { directory, file, extents, jobs, written, in_flight: 0, thread })
    }

    /// Starts to write a tensor, which nobody else may hold.
    ///
    /// # Errors
    /// An earlier write that failed.
    pub(super) fn store(&mut self, tensor: Tensor) -> Result<Stored, EngineError> {
        self.wait(MAX_IN_FLIGHT - 1)?;
        let bytes = crate::tensor::bytes(&tensor) as u64;
        let offset = lock(&self.extents).take(bytes);
        let stored = Stored { offset, bytes, shape: tensor.shape().clone(), extents: self.extents.clone() };
        self.send(Job::Write(tensor, offset))?;
        self.in_flight += 1;
        Ok(stored)
    }

    /// Starts to bring tensors to where [`load`](Self::load) finds them fast.
    ///
    /// # Errors
    /// When the thread has ended.
    pub(super) fn read_ahead<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a Stored>,
    ) -> Result<(), EngineError> {
        tensors
            .into_iter()
            .try_for_each(|stored| self.send(Job::ReadAhead { offset: stored.offset, bytes: stored.bytes }))
    }

    /// Reads a tensor back and frees its place.
    ///
    /// # Errors
    /// A write or read that failed.
    pub(super) fn load(&mut self, stored: Stored, workspace: &Workspace) -> Result<Tensor, EngineError> {
        self.wait(0)?;
        let tensor = workspace.take(stored.shape.clone())?;
        read(&self.file, &tensor, stored.offset).map_err(|source| self.failed(source))?;
        Ok(tensor)
    }

    /// Waits until at most `in_flight` tensors are still to be written. Those that are done are freed:
    /// recycled, they would be spare when the backward pass needs the memory.
    fn wait(&mut self, in_flight: usize) -> Result<(), EngineError> {
        while self.in_flight > in_flight {
            let written = self.written.recv().unwrap_or_else(|_| Err(ended()));
            self.in_flight -= 1;
            drop(written.map_err(|source| self.failed(source))?);
        }
        Ok(())
    }

    fn send(&self, job: Job) -> Result<(), EngineError> {
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(job));
        if matches!(sent, Some(Ok(()))) { Ok(()) } else { Err(self.failed(ended())) }
    }

    fn failed(&self, source: io::Error) -> EngineError {
        EngineError::Offload { directory: self.directory.clone(), source }
    }
}

impl Drop for CheckpointFile {
    fn drop(&mut self) {
        self.jobs = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        lock(&self.extents).free.entry(self.bytes).or_default().push(self.offset);
    }
}

impl Extents {
    /// A free place of this size. One that is being written still is written first: the thread
    /// goes by the order of its jobs.
    fn take(&mut self, bytes: u64) -> u64 {
        if let Some(offset) = self.free.get_mut(&bytes).and_then(Vec::pop) {
            return offset;
        }
        let offset = self.end;
        self.end += bytes;
        offset
    }
}

/// `None` when nobody waits for results any more.
fn work(file: &File, job: Job, done: &Sender<io::Result<Tensor>>) -> Option<()> {
    match job {
        Job::Write(tensor, offset) => {
            let written = write(file, &tensor, offset);
            done.send(written.map(|()| tensor)).ok()
        }
        Job::ReadAhead { offset, bytes } => {
            let mut page_in = vec![0; READ_AHEAD_BYTES];
            for start in (0..bytes).step_by(page_in.len()) {
                let len = page_in.len().min((bytes - start) as usize);
                // A read that fails here fails again where its result is needed, and is reported there.
                let _ = file.read_exact_at(&mut page_in[..len], offset + start);
            }
            Some(())
        }
    }
}

fn write(file: &File, tensor: &Tensor, offset: u64) -> io::Result<()> {
    let write = |bytes: &[u8]| file.write_all_at(bytes, offset);
    let written = match tensor.dtype() {
        DType::BF16 => with_slice(tensor, |x: &[bf16]| write(bytemuck::cast_slice(x.reinterpret_cast()))),
        DType::F16 => with_slice(tensor, |x: &[f16]| write(bytemuck::cast_slice(x.reinterpret_cast()))),
        _ => with_slice(tensor, |x: &[f32]| write(bytemuck::cast_slice(x))),
    };
    written.map_err(io::Error::other)?
}

fn read(file: &File, tensor: &Tensor, offset: u64) -> io::Result<()> {
    let read = |bytes: &mut [u8]| file.read_exact_at(bytes, offset);
    let done = match tensor.dtype() {
        DType::BF16 => {
            with_slice_mut(tensor, |x: &mut [bf16]| read(bytemuck::cast_slice_mut(x.reinterpret_cast_mut())))
        }
        DType::F16 => {
            with_slice_mut(tensor, |x: &mut [f16]| read(bytemuck::cast_slice_mut(x.reinterpret_cast_mut())))
        }
        _ => with_slice_mut(tensor, |x: &mut [f32]| read(bytemuck::cast_slice_mut(x))),
    };
    done.map_err(io::Error::other)?
}

fn lock(extents: &Mutex<Extents>) -> std::sync::MutexGuard<'_, Extents> {
    extents.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ended() -> io::Error {
    io::Error::other("the thread that writes it has ended")
}
