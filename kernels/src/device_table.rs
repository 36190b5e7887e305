//! Tables that the host creates and copies to the device once for its kernels.

use crate::device::dry;
use crate::tensor::{Element, from_slice, zeros};
use candle_core::{Device, Tensor};
use std::sync::{Arc, OnceLock};

/// A table on the first device that requests it. Clones share it, so that a model's layers copy it once.
#[derive(Debug, Clone, Default)]
pub(super) struct DeviceTable(Arc<OnceLock<Tensor>>);

impl DeviceTable {
    /// The table of `len` values on `device`, flat. `values` must return the same values in every call.
    pub(super) fn on<T: Element, V: AsRef<[T]>>(
        &self,
        device: &Device,
        len: usize,
        values: impl FnOnce() -> V,
    ) -> candle_core::Result<Tensor> {
        match self.0.get() {
            Some(table) if table.device().same_device(device) => return Ok(table.clone()),
            _ => {}
        }
        let table = match dry::is_dry() {
            true => zeros(len, T::DTYPE, device)?,
            false => from_slice(values().as_ref(), device)?,
        };
        // The table of another device may be cached already: this one is then not cached.
        _ = self.0.set(table.clone());
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_made_once_for_all_clones() -> candle_core::Result<()> {
        let table = DeviceTable::default();
        let first = table.on(&Device::Cpu, 3, || vec![3u32, 1, 2])?;
        let again = table.clone().on::<u32, Vec<u32>>(&Device::Cpu, 3, || panic!("made a second time"))?;
        assert_eq!((first.to_vec1::<u32>()?, again.to_vec1::<u32>()?), (vec![3, 1, 2], vec![3, 1, 2]));
        Ok(())
    }
}
