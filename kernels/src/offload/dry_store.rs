//! The offload store of dry runs, which reports copies instead of making them.

use super::file::READ_AHEAD_BYTES;
use super::{Backing, Extent, ExtentSlice, OffloadError, Work};
use crate::device::dry::{Allocation, report_copy};
use candle_core::Tensor;
use parking_lot::Mutex;

/// Keeps tensors until they would have been copied.
#[derive(Debug)]
pub(super) struct DryStore {
    /// The buffer of the file thread's read-ahead, allocated throughout.
    read_ahead: Option<Allocation>,
    /// Tensors with a pending copy, by the offsets of their extents.
    pending_writes: Mutex<Vec<(u64, Tensor)>>,
}

impl DryStore {
    pub(super) fn file() -> Self {
        Self { read_ahead: Allocation::on_host(READ_AHEAD_BYTES), pending_writes: Mutex::default() }
    }

    pub(super) fn host_memory() -> Self {
        Self { read_ahead: None, pending_writes: Mutex::default() }
    }
}

impl Backing for DryStore {
    fn write(&self, extent: &Extent, tensor: Tensor) -> Result<(), OffloadError> {
        report_copy(extent.bytes);
        self.pending_writes.lock().push((extent.offset, tensor));
        Ok(())
    }

    fn settle(&self) -> Result<(), OffloadError> {
        self.pending_writes.lock().clear();
        Ok(())
    }

    /// A file needs no tensor for its read-ahead.
    fn warm(&self, _: &Extent) -> Result<bool, OffloadError> {
        Ok(self.read_ahead.is_some())
    }

    fn start_read(&self, extent: &Extent, _: &Tensor) -> Result<(), OffloadError> {
        if self.pending_writes.lock().iter().any(|(offset, _)| *offset == extent.offset) {
            self.settle()?;
        }
        report_copy(extent.bytes);
        Ok(())
    }

    fn finish_read(&self, _: &Extent) -> Result<(), OffloadError> {
        Ok(())
    }

    fn free(&self, _: &[u64]) {}

    fn is_in_host_memory(&self) -> bool {
        self.read_ahead.is_none()
    }

    /// Reports one pass over the bytes in the place of the work: the memory of the host limits it, and has about the
    /// bandwidth of copies if all ranks of a node use it.
    fn with_bytes(&self, slices: &[ExtentSlice<'_>], work: Work<'_>) -> Result<(), OffloadError> {
        report_copy(slices.iter().map(|slice| slice.bytes.len() as u64).sum());
        work(Vec::new());
        Ok(())
    }
}
