//! Offload: moves tensors out of their rank's memory between their uses. Used for activation checkpoints,
//! optimizer state and parameter partitions.
//!
//! | tensors | offloaded to | copied by |
//! |---|---|---|
//! | on the CPU | an unnamed file | a thread (`file.rs`) |
//! | on a GPU | page-locked host memory | separate streams (`host.rs`) |
//!
//! Both overlap with computation: [`OffloadStore::write`] returns at once, and [`OffloadStore::read_ahead`]
//! starts what [`OffloadStore::read`] completes.

mod dry_store;
mod extents;
mod file;
mod host;

pub use extents::{Extent, ExtentSlice};

use crate::device::{DeviceError, Target, dry};
use candle_core::{Device, Tensor};
use extents::Extents;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The description of a store, for its errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLabel {
    /// Description of its tensors.
    pub holds: &'static str,
    /// The config key that names its directory, or enables it.
    pub key: &'static str,
}

/// An error of offloading.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// Offload to a file failed.
    #[error(
        "cannot offload {} to a file in {}: {source}; set `{}` to another directory",
        label.holds, directory.display(), label.key
    )]
    File {
        /// Description of the store.
        label: StoreLabel,
        /// Directory of the file.
        directory: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Offload to host memory failed.
    #[error("cannot offload {} to page-locked host memory, as `{}` requests: {source}", label.holds, label.key)]
    Host {
        /// Description of the store.
        label: StoreLabel,
        /// The driver's error.
        source: Box<DeviceError>,
    },
}

/// Storage for one rank's offloaded tensors.
#[derive(Debug)]
pub struct OffloadStore {
    backing: Box<dyn Backing>,
    extents: Arc<Mutex<Extents>>,
    /// Tensors that are being read ahead, by the offsets of their extents.
    prefetched: Mutex<HashMap<u64, Tensor>>,
}

/// Work on the bytes of several extents.
type Work<'a> = &'a mut dyn FnMut(Vec<&mut [u8]>);

/// The storage behind a store. Calls return before the work that they start is done.
trait Backing: Debug + Send + Sync {
    /// Starts to copy a tensor to an extent.
    fn write(&self, extent: &Extent, tensor: Tensor) -> Result<(), OffloadError>;

    /// Frees the tensors passed to [`write`](Self::write), once they are copied.
    fn settle(&self) -> Result<(), OffloadError>;

    /// Starts to read an extent ahead, if that needs no tensor. Returns whether it did.
    fn warm(&self, extent: &Extent) -> Result<bool, OffloadError>;

    /// Starts to copy an extent to a tensor without other users.
    fn start_read(&self, extent: &Extent, into: &Tensor) -> Result<(), OffloadError>;

    /// Makes later work on the tensor's device wait for the started reads of an extent.
    fn finish_read(&self, extent: &Extent) -> Result<(), OffloadError>;

    /// Frees the storage of extents that no tensor uses, given by their offsets, after the copies to and from it.
    fn free(&self, offsets: &[u64]);

    /// Returns whether extents are in host memory.
    fn is_in_host_memory(&self) -> bool;

    /// Calls `work` once with bytes of distinct extents in host memory, after the copies to and from them; without
    /// bytes in a dry run.
    fn with_bytes(&self, slices: &[ExtentSlice<'_>], work: Work<'_>) -> Result<(), OffloadError>;
}

impl OffloadStore {
    /// Creates a store in a file, for tensors on the CPU. The file is in `directory`, or in the system's
    /// directory for temporary files.
    ///
    /// # Errors
    /// A directory that cannot be written to.
    pub fn in_file(label: StoreLabel, directory: Option<&Path>) -> Result<Self, OffloadError> {
        if dry::is_dry() {
            return Ok(Self::on(Box::new(dry_store::DryStore::file())));
        }
        Ok(Self::on(Box::new(file::File::create(label, directory)?)))
    }

    /// Creates a store in host memory, for tensors on `device`; `None` for the CPU.
    ///
    /// # Errors
    /// A device that this build does not support, or an error of the driver.
    pub fn in_host_memory(label: StoreLabel, device: &Device) -> Result<Option<Self>, OffloadError> {
        let failed = |source| OffloadError::Host { label, source: Box::new(source) };
        match Target::of(device).map_err(failed)? {
            Target::Cpu | Target::Dry(_) => Ok(None),
            Target::Kernels(launcher) => {
                host::backing(&launcher, label).map(|backing| Some(Self::on(backing))).map_err(failed)
            }
        }
    }

    /// A store for tests: copies of CPU tensors that complete as late as a GPU's may.
    #[doc(hidden)]
    pub fn with_late_copies() -> Self {
        let label = StoreLabel { holds: "numbers", key: "a.key" };
        Self::on(Box::new(host::HostMemory::new(label, crate::device::LateCopies::default())))
    }

    fn on(backing: Box<dyn Backing>) -> Self {
        Self { backing, extents: Arc::default(), prefetched: Mutex::default() }
    }

    /// Reserves an extent of so many bytes, with unspecified content.
    pub fn reserve(&self, bytes: usize) -> Extent {
        Extent::reserve(&self.extents, bytes)
    }

    /// Starts to copy a tensor to an extent of its size. The tensor must not change until it is
    /// [settled](Self::settle).
    ///
    /// # Errors
    /// A copy that cannot be started.
    pub fn write(&self, extent: &Extent, tensor: Tensor) -> Result<(), OffloadError> {
        // What was read ahead is stale.
        self.prefetched.lock().remove(&extent.offset);
        self.backing.write(extent, tensor)
    }

    /// Frees the tensors passed to [`write`](Self::write), on this thread, since memory is counted per
    /// thread. Waits for the writes on a CPU. On a GPU only its later work waits, not the host.
    ///
    /// # Errors
    /// A write that failed.
    pub fn settle(&self) -> Result<(), OffloadError> {
        self.backing.settle()
    }

    /// Starts to read an extent ahead. If that needs a tensor, `empty` creates it, and the next
    /// [`read`](Self::read) returns it.
    ///
    /// # Errors
    /// An error of `empty`, or a copy that cannot be started.
    pub fn read_ahead<E: From<OffloadError>>(
        &self,
        extent: &Extent,
        empty: impl FnOnce() -> Result<Tensor, E>,
    ) -> Result<(), E> {
        if self.prefetched.lock().contains_key(&extent.offset) || self.backing.warm(extent)? {
            return Ok(());
        }
        let tensor = self.started(extent, empty)?;
        self.prefetched.lock().insert(extent.offset, tensor);
        Ok(())
    }

    /// Returns the content of an extent: the tensor that was read ahead, or else one created by `empty`, with
    /// the size and element type of what was written. The tensor has no other users.
    ///
    /// # Errors
    /// An error of `empty`, or a write or read that failed.
    pub fn read<E: From<OffloadError>>(
        &self,
        extent: &Extent,
        empty: impl FnOnce() -> Result<Tensor, E>,
    ) -> Result<Tensor, E> {
        let prefetched = self.prefetched.lock().remove(&extent.offset);
        let tensor = prefetched.map_or_else(|| self.started(extent, empty), Ok)?;
        self.backing.finish_read(extent)?;
        Ok(tensor)
    }

    /// Frees the storage of extents that are not in use. Without it, that storage waits for tensors of the same sizes:
    /// call it when sizes change.
    ///
    /// # Errors
    /// A write that failed.
    pub fn trim(&self) -> Result<(), OffloadError> {
        self.settle()?;
        let offsets = self.extents.lock().forget_free();
        let mut prefetched = self.prefetched.lock();
        offsets.iter().for_each(|offset| drop(prefetched.remove(offset)));
        self.backing.free(&offsets);
        Ok(())
    }

    /// Returns whether extents are in host memory, where [`with_bytes`](Self::with_bytes) can work on them.
    pub fn is_in_host_memory(&self) -> bool {
        self.backing.is_in_host_memory()
    }

    /// Calls `work` with bytes of distinct extents in host memory, in this order. An extent's first byte is aligned for
    /// f32. The host first waits for copies to and from the extents. An extent that was never written has unspecified content. In a dry
    /// run there are no bytes. `work` must not use the store.
    ///
    /// # Errors
    /// Extents that are not in [host memory](Self::is_in_host_memory), or an error of the driver.
    pub fn with_bytes(
        &self,
        slices: &[ExtentSlice<'_>],
        mut work: impl FnMut(Vec<&mut [u8]>),
    ) -> Result<(), OffloadError> {
        let mut prefetched = self.prefetched.lock();
        // What was read ahead is stale.
        slices.iter().for_each(|slice| drop(prefetched.remove(&slice.extent.offset)));
        drop(prefetched);
        self.backing.with_bytes(slices, &mut work)
    }

    fn started<E: From<OffloadError>>(
        &self,
        extent: &Extent,
        empty: impl FnOnce() -> Result<Tensor, E>,
    ) -> Result<Tensor, E> {
        let tensor = empty()?;
        self.backing.start_read(extent, &tensor)?;
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests;
