//! Values of a micro batch, one per token, on the host and on a device.

use crate::OpError;
use crate::device::Target;
use crate::device_table::DeviceTable;
use crate::host_table::HostTable;
use crate::tensor::Element;
use candle_core::{Device, Tensor};
use std::ops::Deref;
use std::sync::Arc;

/// Values, one per token, for the kernels of both directions. They are copied to a device once.
///
/// Cloning copies pointers only.
#[derive(Debug, Clone)]
pub struct TokenTable<T> {
    host: HostTable<T>,
    on_device: DeviceTable,
}

impl<T> Deref for TokenTable<T> {
    type Target = HostTable<T>;

    fn deref(&self) -> &HostTable<T> {
        &self.host
    }
}

impl<T: Element> TokenTable<T> {
    /// Creates values on the host; a slice is copied.
    pub fn new(values: impl Into<Arc<[T]>>) -> Self {
        Self { host: HostTable::new(values), on_device: DeviceTable::default() }
    }

    /// Values of a [dry run](crate::device::dry): only their number.
    pub fn dry(len: usize) -> Self {
        Self { host: HostTable::dry(len), on_device: DeviceTable::default() }
    }

    /// Copies the values to `device`, if its ops run CUDA kernels. Otherwise the first op that needs them
    /// does.
    ///
    /// # Errors
    /// A device without kernels in this build, or a failed copy.
    pub fn upload(&self, device: &Device) -> Result<(), OpError> {
        let op = "TokenTable::upload";
        match Target::of(device).map_err(|source| OpError::Device { op, source })? {
            Target::Cpu | Target::Dry(_) => Ok(()),
            Target::Kernels(_) => self.on(device).map(drop).map_err(|source| OpError::Candle { op, source }),
        }
    }

    /// The values on `device`.
    pub(crate) fn on(&self, device: &Device) -> candle_core::Result<Tensor> {
        self.on_device.on(device, self.len(), || &self[..])
    }
}
