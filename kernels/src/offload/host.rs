//! Page-locked host memory, for tensors on a GPU.
//!
//! Copies overlap with the device's other work. Work that is queued after a copy must not overwrite its
//! source or use its destination before the copy is done. [`HostCopies::hold`] makes the device, not the
//! host, wait for that.
#![cfg_attr(
    not(any(test, feature = "cuda")),
    allow(dead_code, reason = "compiled always, but without a device there is no host memory next to it")
)]

use super::{Backing, Extent, ExtentSlice, OffloadError, StoreLabel, Work};
use crate::device::{DeviceError, HostCopies, Launcher};
use candle_core::Tensor;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::{self, Debug, Formatter};

/// The host memory of a launcher's device.
pub(super) fn backing(launcher: &Launcher, label: StoreLabel) -> Result<Box<dyn Backing>, DeviceError> {
    match launcher {
        Launcher::Dry => {
            let _ = label;
            Ok(Box::new(super::dry_store::DryStore::host_memory()))
        }
        #[cfg(feature = "cuda")]
        Launcher::Cuda(device) => {
            Ok(Box::new(HostMemory::new(label, crate::device::CudaCopies::new(device)?)))
        }
    }
}

/// One rank's host memory.
pub(super) struct HostMemory<C: HostCopies> {
    label: StoreLabel,
    copies: C,
    /// Blocks by the offsets of their extents. A block outlives its extent and serves the next one at that
    /// offset, until it is freed.
    blocks: Mutex<HashMap<u64, Block<C>>>,
    /// Tensors being copied to host memory, with their copies.
    pending_writes: Mutex<Vec<(Tensor, C::Copy)>>,
}

/// The memory of one extent.
struct Block<C: HostCopies> {
    memory: C::Memory,
    /// The last copy from it.
    read: Option<C::Copy>,
}

impl<C: HostCopies> HostMemory<C> {
    pub(super) fn new(label: StoreLabel, copies: C) -> Self {
        Self { label, copies, blocks: Mutex::default(), pending_writes: Mutex::default() }
    }

    fn failed(&self) -> impl Fn(DeviceError) -> OffloadError + use<C> {
        let label = self.label;
        move |source| OffloadError::Host { label, source: Box::new(source) }
    }

    /// Calls a function with the memory of an extent that has been written.
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

impl<C: HostCopies> HostMemory<C> {
    /// Allocates the memory of an extent, if it has none.
    fn allocate(&self, extent: &Extent) -> Result<(), OffloadError> {
        if let Entry::Vacant(place) = self.blocks.lock().entry(extent.offset) {
            let memory = self.copies.allocate(extent.bytes as usize).map_err(self.failed())?;
            place.insert(Block { memory, read: None });
        }
        Ok(())
    }
}

impl<C: HostCopies> Backing for HostMemory<C> {
    fn write(&self, extent: &Extent, tensor: Tensor) -> Result<(), OffloadError> {
        self.allocate(extent)?;
        let copy = self.with_block(extent, |block| self.copies.store(&tensor, &mut block.memory))?;
        self.pending_writes.lock().push((tensor, copy));
        Ok(())
    }

    fn settle(&self) -> Result<(), OffloadError> {
        for (tensor, copy) in self.pending_writes.lock().drain(..) {
            self.copies.hold(&copy).map_err(self.failed())?;
            drop(tensor);
        }
        Ok(())
    }

    /// Read-ahead needs a tensor on the device.
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

    fn free(&self, offsets: &[u64]) {
        let mut blocks = self.blocks.lock();
        offsets.iter().for_each(|offset| drop(blocks.remove(offset)));
    }

    fn is_in_host_memory(&self) -> bool {
        true
    }

    fn with_bytes(&self, slices: &[ExtentSlice<'_>], work: Work<'_>) -> Result<(), OffloadError> {
        slices.iter().try_for_each(|slice| self.allocate(slice.extent))?;
        let mut blocks = self.blocks.lock();
        let mut blocks: HashMap<u64, &mut Block<C>> =
            blocks.iter_mut().map(|(offset, block)| (*offset, block)).collect();
        let mut bytes = Vec::with_capacity(slices.len());
        for ExtentSlice { extent, bytes: range } in slices {
            let missing = || self.failed()(DeviceError::NotWritten { bytes: extent.bytes });
            let block = blocks.remove(&extent.offset).ok_or_else(missing)?;
            bytes.push(&mut self.copies.bytes(&mut block.memory).map_err(self.failed())?[range.clone()]);
        }
        work(bytes);
        Ok(())
    }
}

impl<C: HostCopies> Debug for HostMemory<C> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("label", &self.label).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::LateCopies;
    use crate::offload::Extents;
    use candle_core::{DType, Device};
    use std::sync::Arc;

    #[test]
    fn blocks_of_sizes_that_are_not_used_any_more_are_freed() {
        let label = StoreLabel { holds: "numbers", key: "a.key" };
        let (memory, extents) = (HostMemory::new(label, LateCopies::default()), Arc::default());
        let write = |bytes: usize| {
            let extent = Extent::reserve(&extents, bytes);
            memory.write(&extent, Tensor::zeros(bytes / 4, DType::F32, &Device::Cpu).unwrap()).unwrap();
            extent
        };
        let num_blocks = || memory.blocks.lock().len();
        let trim = || memory.free(&Mutex::<Extents>::lock(&extents).forget_free());
        let _lasting = write(4);
        for bytes in [20, 20, 28] {
            let of_step = [(); 3].map(|()| write(bytes));
            assert_eq!(num_blocks(), 1 + 3, "{bytes} bytes");
            trim();
            assert_eq!(num_blocks(), 1 + 3, "{bytes} bytes, in use");
            drop(of_step);
            trim();
            assert_eq!(num_blocks(), 1, "{bytes} bytes, not in use");
        }
    }
}
