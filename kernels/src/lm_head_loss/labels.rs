//! The labels of a micro batch.

use crate::device::dry::Allocation;
use crate::device_table::DeviceTable;
use candle_core::{Device, Tensor};
use std::ops::Deref;
use std::sync::Arc;

/// Labels, for both directions. They are copied to a device once.
///
/// Cloning copies pointers only.
#[derive(Debug, Clone)]
pub struct Labels {
    labels: Arc<[i64]>,
    len: usize,
    on_device: DeviceTable,
    /// Their memory in a dry run.
    _dry: Arc<Option<Allocation>>,
}

impl Deref for Labels {
    type Target = [i64];

    fn deref(&self) -> &[i64] {
        &self.labels
    }
}

impl Labels {
    /// Creates labels on the host; a slice is copied.
    pub fn new(labels: impl Into<Arc<[i64]>>) -> Self {
        let labels = labels.into();
        Self { len: labels.len(), labels, on_device: DeviceTable::default(), _dry: Arc::default() }
    }

    /// Labels of a [dry run](crate::device::dry): only their number.
    pub fn dry(len: usize) -> Self {
        let _dry = Arc::new(Allocation::on_host(len * size_of::<i64>()));
        Self { len, _dry, ..Self::new([]) }
    }

    /// Number of labels.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no labels.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The labels on `device`.
    pub(super) fn on(&self, device: &Device) -> candle_core::Result<Tensor> {
        self.on_device.on(device, self.len, || &self.labels)
    }
}
