//! Page-locked memory of the host, for tensors on a GPU.
//!
//! Copies go on beside the device's other work. What the device is given after a copy of a tensor may not overwrite
//! that tensor, and what it is given after a read may not use the result, before the copy is done: both wait where
//! [`HostCopies::hold`] says so, and only the device does.
#![cfg_attr(
    not(any(test, feature = "cuda", feature = "kernel-emulation")),
    allow(dead_code, reason = "compiled always, but without a device there is no memory beside one")
)]

use super::{Backing, Extent, OffloadError, Use};
use crate::device::{DeviceError, HostCopies, Launcher};
use candle_core::Tensor;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::{self, Debug, Formatter};

/// The memory beside the device that a launcher launches on.
pub(super) fn beside(launcher: &Launcher, use_: Use) -> Result<Box<dyn Backing>, DeviceError> {
    match launcher {
        Launcher::Dry => {
            let _ = use_;
            Ok(Box::new(super::dry_store::DryStore::host_memory()))
        }
        #[cfg(feature = "kernel-emulation")]
        Launcher::Emulated => Ok(Box::new(HostMemory::new(use_, crate::device::LateCopies::default()))),
        #[cfg(feature = "cuda")]
        Launcher::Cuda(device) => {
            Ok(Box::new(HostMemory::new(use_, crate::device::CudaCopies::new(device)?)))
        }
    }
}

/// What one rank keeps there.
pub(super) struct HostMemory<C: HostCopies> {
    use_: Use,
    copies: C,
    /// By the offsets of extents; a block outlives its extent and serves the next one in its place.
    blocks: Mutex<HashMap<u64, Block<C>>>,
    /// Tensors that are being copied here, with their copies.
    leaving: Mutex<Vec<(Tensor, C::Copy)>>,
}

/// The memory of one extent.
struct Block<C: HostCopies> {
    memory: C::Memory,
    /// The last copy from it.
    read: Option<C::Copy>,
}

impl<C: HostCopies> HostMemory<C> {
    pub(super) fn new(use_: Use, copies: C) -> Self {
        Self { use_, copies, blocks: Mutex::default(), leaving: Mutex::default() }
    }

    fn failed(&self) -> impl Fn(DeviceError) -> OffloadError + use<C> {
        let use_ = self.use_;
        move |source| OffloadError::Host { use_, source: Box::new(source) }
    }

    /// Works on the memory of an extent that has been written.
    fn with_block<R>(
        &self,
        extent: &Extent,
        work: impl FnOnce(&mut Block<C>) -> Result<R, DeviceError>,
    ) -> Result<R, OffloadError> {
        let mut blocks = self.blocks.lock();
        let block = blocks.get_mut(&extent.offset).ok_or(DeviceError::NotWritten { bytes: extent.bytes });
        block.and_then(work).map_err(self.failed())
    }
}

impl<C: HostCopies> Backing for HostMemory<C> {
    fn write(&self, extent: &Extent, tensor: Tensor) -> Result<(), OffloadError> {
        if let Entry::Vacant(place) = self.blocks.lock().entry(extent.offset) {
            let memory = self.copies.allocate(extent.bytes as usize).map_err(self.failed())?;
            place.insert(Block { memory, read: None });
        }
        let copy = self.with_block(extent, |block| self.copies.store(&tensor, &mut block.memory))?;
        self.leaving.lock().push((tensor, copy));
        Ok(())
    }

    fn settle(&self) -> Result<(), OffloadError> {
        for (tensor, copy) in self.leaving.lock().drain(..) {
            self.copies.hold(&copy).map_err(self.failed())?;
            drop(tensor);
        }
        Ok(())
    }

    /// It takes a tensor on the device.
    fn warm(&self, _: &Extent) -> Result<bool, OffloadError> {
        Ok(false)
    }

    fn start_read(&self, extent: &Extent, into: &Tensor) -> Result<(), OffloadError> {
        self.with_block(extent, |block| {
            block.read = Some(self.copies.load(&mut block.memory, into)?);
            Ok(())
        })
    }

    fn finish_read(&self, extent: &Extent) -> Result<(), OffloadError> {
        self.with_block(extent, |block| match &block.read {
            Some(copy) => self.copies.hold(copy),
            None => Ok(()),
        })
    }
}

impl<C: HostCopies> Debug for HostMemory<C> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("use_", &self.use_).finish_non_exhaustive()
    }
}
