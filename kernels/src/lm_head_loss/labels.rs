//! The labels of a micro batch.

use crate::device_table::DeviceTable;
use candle_core::{Device, Tensor};
use std::ops::Deref;
use std::sync::Arc;

/// Labels, for both directions. Where kernels need them, they are copied to the device once.
///
/// Cloning copies pointers only.
#[derive(Debug, Clone)]
pub struct Labels {
    labels: Arc<[i64]>,
    on_device: DeviceTable,
}

impl Deref for Labels {
    type Target = [i64];

    fn deref(&self) -> &[i64] {
        &self.labels
    }
}

impl Labels {
    /// Labels on the host; a slice is copied.
    pub fn new(labels: impl Into<Arc<[i64]>>) -> Self {
        Self { labels: labels.into(), on_device: DeviceTable::default() }
    }

    /// The labels on `device`.
    pub(super) fn on(&self, device: &Device) -> candle_core::Result<Tensor> {
        self.on_device.on(device, || &self.labels)
    }
}
