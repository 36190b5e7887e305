//! An unnamed file, which vanishes with its last handle.
//!
//! A thread writes while its owner continues. Before a tensor is needed, the same thread reads it ahead, so
//! that it is in the system's page cache, which does not count as a rank's memory.

use super::{Backing, Extent, ExtentSlice, OffloadError, StoreLabel, Work};
use crate::tensor::{with_bytes, with_bytes_mut};
use candle_core::Tensor;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// Read size of the read-ahead.
pub(super) const READ_AHEAD_BYTES: usize = 1 << 17;

/// The file of one rank.
#[derive(Debug)]
pub(super) struct File {
    label: StoreLabel,
    directory: PathBuf,
    file: Arc<std::fs::File>,
    writer: Mutex<Writer>,
    thread: Option<JoinHandle<()>>,
}

/// The owner's handle of the thread.
#[derive(Debug)]
struct Writer {
    /// `None` only while the thread is being stopped.
    jobs: Option<Sender<Job>>,
    written: Receiver<io::Result<Tensor>>,
    /// Offsets of the tensors being written, in the order of their jobs.
    in_flight: VecDeque<u64>,
}

#[derive(Debug)]
enum Job {
    Write(Tensor, u64),
    ReadAhead { offset: u64, bytes: u64 },
}

impl File {
    /// Creates the file in `directory`, or in the system's directory for temporary files.
    pub(super) fn create(label: StoreLabel, directory: Option<&Path>) -> Result<Self, OffloadError> {
        let directory = directory.map_or_else(std::env::temp_dir, Path::to_owned);
        let failed = |source| OffloadError::File { label, directory: directory.clone(), source };
        let file = Arc::new(tempfile::tempfile_in(&directory).map_err(failed)?);
        let (jobs, todo) = channel();
        let (done, written) = channel();
        let of_thread = file.clone();
        let work = move || todo.iter().try_for_each(|job| work(&of_thread, job, &done)).unwrap_or(());
        let name = "ulysses-offload".to_owned();
        let thread = std::thread::Builder::new().name(name).spawn(work).map_err(failed)?;
        let writer = Mutex::new(Writer { jobs: Some(jobs), written, in_flight: VecDeque::new() });
        Ok(Self { label, directory, file, writer, thread: Some(thread) })
    }

    fn failed(&self, source: io::Error) -> OffloadError {
        OffloadError::File { label: self.label, directory: self.directory.clone(), source }
    }
}

impl Backing for File {
    fn write(&self, extent: &Extent, tensor: Tensor) -> Result<(), OffloadError> {
        let mut writer = self.writer.lock();
        writer.send(Job::Write(tensor, extent.offset)).map_err(|source| self.failed(source))?;
        writer.in_flight.push_back(extent.offset);
        Ok(())
    }

    fn settle(&self) -> Result<(), OffloadError> {
        self.writer.lock().settle().map_err(|source| self.failed(source))
    }

    /// Reads ahead into the system's page cache.
    fn warm(&self, extent: &Extent) -> Result<bool, OffloadError> {
        let job = Job::ReadAhead { offset: extent.offset, bytes: extent.bytes };
        self.writer.lock().send(job).map(|()| true).map_err(|source| self.failed(source))
    }

    /// Reads all of it.
    fn start_read(&self, extent: &Extent, into: &Tensor) -> Result<(), OffloadError> {
        let mut writer = self.writer.lock();
        if writer.in_flight.contains(&extent.offset) {
            writer.settle().map_err(|source| self.failed(source))?;
        }
        drop(writer);
        let read = with_bytes_mut(into, |bytes| self.file.read_exact_at(bytes, extent.offset));
        read.map_err(io::Error::other).flatten().map_err(|source| self.failed(source))
    }

    fn finish_read(&self, _: &Extent) -> Result<(), OffloadError> {
        Ok(())
    }

    /// Later extents overwrite the space.
    fn free(&self, _: &[u64]) {}

    fn is_in_host_memory(&self) -> bool {
        false
    }

    fn with_bytes(&self, _: &[ExtentSlice<'_>], _: Work<'_>) -> Result<(), OffloadError> {
        Err(self.failed(io::Error::other("a file cannot be updated in place")))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        self.writer.lock().jobs = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Writer {
    fn send(&self, job: Job) -> io::Result<()> {
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(job));
        if matches!(sent, Some(Ok(()))) { Ok(()) } else { Err(ended()) }
    }

    fn settle(&mut self) -> io::Result<()> {
        while self.in_flight.pop_front().is_some() {
            self.written.recv().unwrap_or_else(|_| Err(ended()))?;
        }
        Ok(())
    }
}

/// `None` if the owner no longer waits for results.
fn work(file: &std::fs::File, job: Job, done: &Sender<io::Result<Tensor>>) -> Option<()> {
    match job {
        Job::Write(tensor, offset) => {
            let written = with_bytes(&tensor, |bytes| file.write_all_at(bytes, offset));
            done.send(written.map_err(io::Error::other).flatten().map(|()| tensor)).ok()
        }
        Job::ReadAhead { offset, bytes } => {
            let mut page_in = vec![0; READ_AHEAD_BYTES];
            for start in (0..bytes).step_by(READ_AHEAD_BYTES) {
                let len = page_in.len().min((bytes - start) as usize);
                // A read error here occurs again when the result is needed, and is reported then.
                let _ = file.read_exact_at(&mut page_in[..len], offset + start);
            }
            Some(())
        }
    }
}

fn ended() -> io::Error {
    io::Error::other("the thread that writes it has ended")
}
