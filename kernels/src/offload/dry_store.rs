//! What a dry run's stores tell instead of copying.

use super::file::READ_AHEAD_BYTES;
use super::{Backing, Extent, OffloadError};
use crate::device::dry::{Allocation, report_copy};
use candle_core::Tensor;
use parking_lot::Mutex;

/// Holds tensors until they would be copied, and nothing after.
#[derive(Debug)]
pub(super) struct DryStore {
    /// The buffer of a file's thread, held throughout: when it reads ahead is its own affair.
    read_ahead: Option<Allocation>,
    /// Tensors that are being copied, by the offsets of their extents.
    leaving: Mutex<Vec<(u64, Tensor)>>,
}

impl DryStore {
    pub(super) fn file() -> Self {
        Self { read_ahead: Allocation::on_host(READ_AHEAD_BYTES), leaving: Mutex::default() }
    }

    pub(super) fn host_memory() -> Self {
        Self { read_ahead: None, leaving: Mutex::default() }
    }
}

impl Backing for DryStore {
    fn write(&self, extent: &Extent, tensor: Tensor) -> Result<(), OffloadError> {
        report_copy(extent.bytes);
        self.leaving.lock().push((extent.offset, tensor));
        Ok(())
    }

    fn settle(&self) -> Result<(), OffloadError> {
        self.leaving.lock().clear();
        Ok(())
    }

    /// A file comes nearer without a tensor.
    fn warm(&self, _: &Extent) -> Result<bool, OffloadError> {
        Ok(self.read_ahead.is_some())
    }

    fn start_read(&self, extent: &Extent, _: &Tensor) -> Result<(), OffloadError> {
        if self.leaving.lock().iter().any(|(offset, _)| *offset == extent.offset) {
            self.settle()?;
        }
        report_copy(extent.bytes);
        Ok(())
    }

    fn finish_read(&self, _: &Extent) -> Result<(), OffloadError> {
        Ok(())
    }
}
