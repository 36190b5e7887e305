//! Tensors in a file, between their uses: checkpoints of layers, optimizer state, partitions of parameters.
//!
//! The file has no name and vanishes with its last handle. A thread writes while its owner goes on; before
//! a tensor is needed, the same thread reads through it, so that the reader finds it in the
//! system's page cache, which no rank's memory pays for.

use crate::tensor::{with_slice, with_slice_mut};
use candle_core::{DType, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// What the thread reads at a time when it reads ahead.
pub const READ_AHEAD_BYTES: usize = 1 << 17;

/// What a file is for, in the words of its errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// What is in it.
    pub holds: &'static str,
    /// The key of the config that names its directory.
    pub key: &'static str,
}

/// Tensors could not be moved to a file or back.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot keep {} in a file in {}: {source}; `{}` may name another directory",
    file.holds, directory.display(), file.key
)]
pub struct OffloadError {
    /// Which file.
    pub file: Use,
    /// Where it is.
    pub directory: PathBuf,
    /// What the system reports.
    pub source: io::Error,
}

/// A file of tensors, of one rank.
#[derive(Debug)]
pub struct OffloadFile {
    use_: Use,
    directory: PathBuf,
    file: Arc<File>,
    extents: Arc<Mutex<Extents>>,
    writer: Mutex<Writer>,
    thread: Option<JoinHandle<()>>,
}

/// A part of the file, for one tensor. Dropping it frees it.
#[derive(Debug)]
pub struct Extent {
    offset: u64,
    bytes: u64,
    extents: Arc<Mutex<Extents>>,
}

/// The parts of the file: sizes repeat from layer to layer and from step to step.
#[derive(Debug, Default)]
struct Extents {
    end: u64,
    free: HashMap<u64, Vec<u64>>,
}

/// The owner's side of the thread.
#[derive(Debug)]
struct Writer {
    /// None only while the thread is told to end.
    jobs: Option<Sender<Job>>,
    written: Receiver<io::Result<Tensor>>,
    /// Where the tensors go that are being written, in the order of their jobs.
    in_flight: VecDeque<u64>,
}

#[derive(Debug)]
enum Job {
    Write(Tensor, u64),
    ReadAhead { offset: u64, bytes: u64 },
}

impl OffloadFile {
    /// Makes the file in `directory`, or where the system keeps temporary files.
    ///
    /// # Errors
    /// A directory that cannot be written to.
    pub fn create(use_: Use, directory: Option<&Path>) -> Result<Self, OffloadError> {
        let directory = directory.map_or_else(std::env::temp_dir, Path::to_owned);
        let failed = |source| OffloadError { file: use_, directory: directory.clone(), source };
        let file = Arc::new(tempfile::tempfile_in(&directory).map_err(failed)?);
        let (jobs, todo) = channel();
        let (done, written) = channel();
        let of_thread = file.clone();
        let work = move || todo.iter().try_for_each(|job| work(&of_thread, job, &done)).unwrap_or(());
        let name = "ulysses-offload".to_owned();
        let thread = std::thread::Builder::new().name(name).spawn(work).map_err(failed)?;
        let writer = Mutex::new(Writer { jobs: Some(jobs), written, in_flight: VecDeque::new() });
        Ok(Self { use_, directory, file, extents: Arc::default(), writer, thread: Some(thread) })
    }

    /// A part of so many bytes. What it holds has no meaning until it has been written.
    pub fn reserve(&self, bytes: usize) -> Extent {
        let bytes = bytes as u64;
        Extent { offset: lock(&self.extents).take(bytes), bytes, extents: self.extents.clone() }
    }

    /// Starts to write a tensor, which nobody else may change until it is [settled](Self::settle), to an extent of
    /// its size.
    ///
    /// # Errors
    /// When the thread has ended.
    pub fn write(&self, extent: &Extent, tensor: Tensor) -> Result<(), OffloadError> {
        let mut writer = lock(&self.writer);
        writer.send(Job::Write(tensor, extent.offset)).map_err(|source| self.failed(source))?;
        writer.in_flight.push_back(extent.offset);
        Ok(())
    }

    /// Waits until everything is written, and frees it: memory is counted by thread, so not where it was written.
    ///
    /// # Errors
    /// A write that failed.
    pub fn settle(&self) -> Result<(), OffloadError> {
        lock(&self.writer).settle().map_err(|source| self.failed(source))
    }

    /// Starts to bring what is in an extent to where [`read`](Self::read) finds it fast.
    ///
    /// # Errors
    /// When the thread has ended.
    pub fn read_ahead(&self, extent: &Extent) -> Result<(), OffloadError> {
        let job = Job::ReadAhead { offset: extent.offset, bytes: extent.bytes };
        lock(&self.writer).send(job).map_err(|source| self.failed(source))
    }

    /// Reads what is in an extent into a tensor of the size and element type that was written.
    ///
    /// # Errors
    /// A write or read that failed.
    pub fn read(&self, extent: &Extent, into: &Tensor) -> Result<(), OffloadError> {
        let mut writer = lock(&self.writer);
        if writer.in_flight.contains(&extent.offset) {
            writer.settle().map_err(|source| self.failed(source))?;
        }
        drop(writer);
        read(&self.file, into, extent.offset).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> OffloadError {
        OffloadError { file: self.use_, directory: self.directory.clone(), source }
    }
}

impl Drop for OffloadFile {
    fn drop(&mut self) {
        lock(&self.writer).jobs = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        lock(&self.extents).free.entry(self.bytes).or_default().push(self.offset);
    }
}

impl Extents {
    /// A free part of this size. One that is being written still is written first: the thread
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

/// `None` when nobody waits for results any more.
fn work(file: &File, job: Job, done: &Sender<io::Result<Tensor>>) -> Option<()> {
    match job {
        Job::Write(tensor, offset) => {
            let written = write(file, &tensor, offset);
            done.send(written.map(|()| tensor)).ok()
        }
        Job::ReadAhead { offset, bytes } => {
            let mut page_in = vec![0; READ_AHEAD_BYTES];
            for start in (0..bytes).step_by(READ_AHEAD_BYTES) {
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

/// No operation under these locks leaves anything half-changed, so a panic elsewhere does not matter.
fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ended() -> io::Error {
    io::Error::other("the thread that writes it has ended")
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    const USE: Use = Use { holds: "numbers", key: "a.key" };

    fn filled(first: u32, len: u32, dtype: DType) -> Tensor {
        Tensor::arange(first, first + len, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    fn bits(tensor: &Tensor) -> Vec<f32> {
        tensor.to_dtype(DType::F32).unwrap().to_vec1().unwrap()
    }

    #[test]
    fn every_place_gives_back_what_was_written_to_it_last() {
        let file = OffloadFile::create(USE, None).unwrap();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let extents = [5, 7, 7].map(|len| file.reserve(len * dtype.size_in_bytes()));
            for round in 0..3 {
                let tensors =
                    [5, 7, 7].iter().zip(0..).map(|(&len, first)| filled(10 * (first + round), len, dtype));
                let tensors: Vec<_> = tensors.collect();
                for (extent, tensor) in extents.iter().zip(&tensors) {
                    file.write(extent, tensor.clone()).unwrap();
                }
                for (extent, tensor) in extents.iter().zip(&tensors).rev() {
                    file.read_ahead(extent).unwrap();
                    let got = tensor.zeros_like().unwrap();
                    file.read(extent, &got).unwrap();
                    assert_eq!(bits(&got), bits(tensor));
                }
            }
        }
    }

    #[test]
    fn a_place_that_is_free_is_taken_again() {
        let file = OffloadFile::create(USE, None).unwrap();
        let [first, other] = [file.reserve(12), file.reserve(16)];
        let offset = first.offset;
        drop(first);
        assert_ne!(file.reserve(16).offset, offset, "of another size");
        assert_eq!(file.reserve(12).offset, offset);
        assert_eq!(other.offset, 12);
    }

    #[test]
    fn a_directory_that_is_not_there_is_named_with_its_key() {
        let error = OffloadFile::create(USE, Some(Path::new("/nowhere"))).unwrap_err().to_string();
        assert!(error.starts_with("cannot keep numbers in a file in /nowhere: "), "{error}");
        assert!(error.ends_with("; `a.key` may name another directory"), "{error}");
    }

    #[test]
    fn reading_what_was_never_written_is_an_error() {
        let file = OffloadFile::create(USE, None).unwrap();
        let extent = file.reserve(8);
        assert!(file.read(&extent, &filled(0, 2, DType::F32)).is_err());
    }
}
