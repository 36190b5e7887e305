//! The token ids of a micro batch.

use super::plan::Plan;
use crate::device::dry::{self, Allocation};
use candle_core::{DType, Device, Tensor};
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

/// Token ids, for both directions. Where kernels need them, they and the plan of the backward pass are copied to the
/// device by the first [`forward`](super::forward): made at its end, the plan would let the device wait for it.
///
/// Cloning copies pointers only.
#[derive(Debug, Clone)]
pub struct Ids {
    ids: Arc<[u32]>,
    len: usize,
    on_device: Arc<OnceLock<DeviceIds>>,
    /// What they take in a dry run.
    _dry: Arc<Option<Allocation>>,
}

impl Deref for Ids {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.ids
    }
}

/// Ids and [`Plan`] on a device.
#[derive(Debug, Clone)]
pub(super) struct DeviceIds {
    /// The ids, then the tables of the plan: all in one copy.
    pub(super) tables: Tensor,
    /// Where `tables` has the plan's tokens, segments and sums.
    pub(super) tokens_at: usize,
    pub(super) segments_at: usize,
    pub(super) sums_at: usize,
    pub(super) segments: usize,
    pub(super) sums: usize,
    /// Rows of partial sums.
    pub(super) partials: usize,
}

impl Ids {
    /// Ids on the host; a slice is copied.
    pub fn new(ids: impl Into<Arc<[u32]>>) -> Self {
        let ids = ids.into();
        Self { len: ids.len(), ids, on_device: Arc::default(), _dry: Arc::default() }
    }

    /// So many ids of a [dry run](dry), of which none is known.
    pub fn dry(len: usize) -> Self {
        let _dry = Arc::new(Allocation::on_host(len * size_of::<u32>()));
        Self { len, _dry, ..Self::new([]) }
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The ids on `device`.
    pub(super) fn on(&self, device: &Device) -> candle_core::Result<DeviceIds> {
        match self.on_device.get() {
            Some(known) if known.tables.device().same_device(device) => return Ok(known.clone()),
            _ => {}
        }
        let made = match dry::is_dry() {
            true => DeviceIds::dry(self.len, device)?,
            false => DeviceIds::new(&self.ids, device)?,
        };
        // Another device's may be there already: then these are used once.
        _ = self.on_device.set(made.clone());
        Ok(made)
    }
}

impl DeviceIds {
    fn new(ids: &[u32], device: &Device) -> candle_core::Result<Self> {
        let Plan { tokens, segments, sums, partials } = Plan::new(ids);
        let tables = [ids, &tokens, segments.as_flattened(), sums.as_flattened()];
        let [tokens_at, segments_at, sums_at] =
            [1, 2, 3].map(|nth| tables[..nth].iter().map(|t| t.len()).sum());
        Ok(Self {
            tables: crate::tensor::from_slice(&tables.concat(), device)?,
            tokens_at,
            segments_at,
            sums_at,
            segments: segments.len(),
            sums: sums.len(),
            partials,
        })
    }

    /// Of ids that are not known: ids, tokens, and a segment of four numbers for each, as of ids that differ.
    fn dry(len: usize, device: &Device) -> candle_core::Result<Self> {
        let tables = crate::tensor::zeros(6 * len, DType::U32, device)?;
        let (tokens_at, segments_at, sums_at) = (len, 2 * len, 6 * len);
        Ok(Self { tables, tokens_at, segments_at, sums_at, segments: len, sums: 0, partials: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_what_was_copied_to_the_device() {
        let ids = Ids::new([3, 0, 3]);
        let first = ids.on(&Device::Cpu).unwrap().tables;
        let of_clone = ids.clone().on(&Device::Cpu).unwrap().tables;
        assert_eq!(first.id(), of_clone.id());
    }

    #[test]
    fn one_table_holds_ids_tokens_segments_and_sums() {
        let ids: Vec<u32> = [vec![1; 129], vec![0]].concat();
        let DeviceIds { tables, tokens_at, segments_at, sums_at, segments, sums, partials } =
            Ids::new(ids.clone()).on(&Device::Cpu).unwrap();
        let tables = tables.to_vec1::<u32>().unwrap();
        assert_eq!(tables[..tokens_at], ids);
        assert_eq!(tables[tokens_at..segments_at][..3], [129, 0, 1]);
        assert_eq!(tables[segments_at..sums_at], [0, 1, 0, 0, 1, 129, 0, 1, 129, 130, 1, 1]);
        assert_eq!(tables[sums_at..], [1, 0, 2]);
        assert_eq!((segments, sums, partials), (3, 1, 2));
    }
}
