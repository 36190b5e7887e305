//! Tensors outside of the memory that their rank computes in, between their uses: checkpoints of layers, optimizer
//! state, partitions of parameters.
//!
//! | tensors are | and wait in | what moves them |
//! |---|---|---|
//! | in a CPU's memory | a file without a name | a thread (`file.rs`) |
//! | on a GPU | page-locked memory of the host | streams of their own (`host.rs`) |
//!
//! Both ways go on while the owner computes: [`OffloadStore::write`] returns at once, and [`OffloadStore::read_ahead`]
//! starts what [`OffloadStore::read`] completes.

mod dry_store;
mod extents;
mod file;
mod host;

pub use extents::Extent;

use crate::device::{DeviceError, Target, dry};
use candle_core::{Device, Tensor};
use extents::Extents;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a store is for, in the words of its errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// What is in it.
    pub holds: &'static str,
    /// The key of the config that names its directory, or asks for the host's memory.
    pub key: &'static str,
}

/// Tensors could not be moved away or back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// To a file.
    #[error(
        "cannot keep {} in a file in {}: {source}; `{}` may name another directory",
        use_.holds, directory.display(), use_.key
    )]
    File {
        /// Which file.
        use_: Use,
        /// Where it is.
        directory: PathBuf,
        /// What the system reports.
        source: io::Error,
    },
    /// To the host's memory.
    #[error("cannot keep {} in page-locked memory of the host, as `{}` asks for: {source}", use_.holds, use_.key)]
    Host {
        /// Which tensors.
        use_: Use,
        /// What the driver reports.
        source: Box<DeviceError>,
    },
}

/// Where one rank's tensors are between their uses.
#[derive(Debug)]
pub struct OffloadStore {
    backing: Box<dyn Backing>,
    extents: Arc<Mutex<Extents>>,
    /// Tensors that are being filled, by what they are filled from.
    arriving: Mutex<HashMap<u64, Tensor>>,
}

/// What holds the bytes. Every call returns before what it starts is done.
trait Backing: Debug + Send + Sync {
    /// Starts to copy a tensor to an extent.
    fn write(&self, extent: &Extent, tensor: Tensor) -> Result<(), OffloadError>;

    /// Frees the tensors that were given to [`write`](Self::write), once they are copied.
    fn settle(&self) -> Result<(), OffloadError>;

    /// Starts to bring an extent nearer, where that takes no tensor to bring it to, and says whether it did.
    fn warm(&self, extent: &Extent) -> Result<bool, OffloadError>;

    /// Starts to copy an extent to a tensor that nobody else uses.
    fn start_read(&self, extent: &Extent, into: &Tensor) -> Result<(), OffloadError>;

    /// Lets all that the tensor's device is given from now on come after the reads of an extent that were started.
    fn finish_read(&self, extent: &Extent) -> Result<(), OffloadError>;
}

impl OffloadStore {
    /// A file in `directory`, or where the system keeps temporary files, for tensors on the CPU.
    ///
    /// # Errors
    /// A directory that cannot be written to.
    pub fn in_file(use_: Use, directory: Option<&Path>) -> Result<Self, OffloadError> {
        if dry::is_dry() {
            return Ok(Self::on(Box::new(dry_store::DryStore::file())));
        }
        Ok(Self::on(Box::new(file::File::create(use_, directory)?)))
    }

    /// The host's memory, for tensors on `device`: none for a CPU's, which are there.
    ///
    /// # Errors
    /// A device that this build cannot use, or a driver that refuses streams.
    pub fn in_host_memory(use_: Use, device: &Device) -> Result<Option<Self>, OffloadError> {
        let failed = |source| OffloadError::Host { use_, source: Box::new(source) };
        match Target::of(device).map_err(failed)? {
            Target::Cpu | Target::Dry(_) => Ok(None),
            Target::Kernels(launcher) => {
                host::beside(&launcher, use_).map(|backing| Some(Self::on(backing))).map_err(failed)
            }
        }
    }

    /// A store for tests: copies of tensors on the CPU that run as late as is allowed, as a GPU's may.
    #[doc(hidden)]
    pub fn with_late_copies() -> Self {
        let use_ = Use { holds: "numbers", key: "a.key" };
        Self::on(Box::new(host::HostMemory::new(use_, crate::device::LateCopies::default())))
    }

    fn on(backing: Box<dyn Backing>) -> Self {
        Self { backing, extents: Arc::default(), arriving: Mutex::default() }
    }

    /// A place for so many bytes. What it holds has no meaning until it has been written.
    pub fn reserve(&self, bytes: usize) -> Extent {
        Extent::take(&self.extents, bytes)
    }

    /// Starts to copy a tensor, which nobody else may change until it is [settled](Self::settle), to an extent of
    /// its size.
    ///
    /// # Errors
    /// A copy that cannot be started.
    pub fn write(&self, extent: &Extent, tensor: Tensor) -> Result<(), OffloadError> {
        // What was read ahead is stale.
        self.arriving.lock().remove(&extent.offset);
        self.backing.write(extent, tensor)
    }

    /// Frees what was given to [`write`](Self::write), here, since memory is counted by thread. On a CPU it waits
    /// until all is written. Of a GPU the host does not wait, but what the GPU is given from now on does.
    ///
    /// # Errors
    /// A write that failed.
    pub fn settle(&self) -> Result<(), OffloadError> {
        self.backing.settle()
    }

    /// Starts to bring back what is in an extent. Where that takes a tensor already, `empty` makes it: the next
    /// [`read`](Self::read) returns that.
    ///
    /// # Errors
    /// What `empty` returns, or a copy that cannot be started.
    pub fn read_ahead<E: From<OffloadError>>(
        &self,
        extent: &Extent,
        empty: impl FnOnce() -> Result<Tensor, E>,
    ) -> Result<(), E> {
        if self.arriving.lock().contains_key(&extent.offset) || self.backing.warm(extent)? {
            return Ok(());
        }
        let tensor = self.started(extent, empty)?;
        self.arriving.lock().insert(extent.offset, tensor);
        Ok(())
    }

    /// What is in an extent: the tensor that was read ahead, else the one that `empty` makes, which has the size and
    /// the element type of what was written. It is the caller's own.
    ///
    /// # Errors
    /// What `empty` returns, a write or a read that failed.
    pub fn read<E: From<OffloadError>>(
        &self,
        extent: &Extent,
        empty: impl FnOnce() -> Result<Tensor, E>,
    ) -> Result<Tensor, E> {
        let arriving = self.arriving.lock().remove(&extent.offset);
        let tensor = arriving.map_or_else(|| self.started(extent, empty), Ok)?;
        self.backing.finish_read(extent)?;
        Ok(tensor)
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
