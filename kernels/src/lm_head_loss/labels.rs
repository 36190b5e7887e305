//! The labels of a micro batch.

use crate::device_table::DeviceTable;
use crate::host_table::HostTable;
use candle_core::{Device, Tensor};
use std::ops::Deref;
use std::sync::Arc;

/// Labels, for both directions. They are copied to a device once.
///
/// Cloning copies pointers only.
#[derive(Debug, Clone)]
pub struct Labels {
    host: HostTable<i64>,
    on_device: DeviceTable,
}

impl Deref for Labels {
    type Target = HostTable<i64>;

    fn deref(&self) -> &HostTable<i64> {
        &self.host
    }
}

impl Labels {
    /// Creates labels on the host; a slice is copied.
    pub fn new(labels: impl Into<Arc<[i64]>>) -> Self {
        Self { host: HostTable::new(labels), on_device: DeviceTable::default() }
    }

    /// Labels of a [dry run](crate::device::dry): only their number.
    pub fn dry(len: usize) -> Self {
        Self { host: HostTable::dry(len), on_device: DeviceTable::default() }
    }

    /// The labels on `device`.
    pub(super) fn on(&self, device: &Device) -> candle_core::Result<Tensor> {
        self.on_device.on(device, self.len(), || &self[..])
    }
}
