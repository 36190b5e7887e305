//! The token ids of a micro batch.

use super::plan::Plan;
use super::{ELSEWHERE, check_ids};
use crate::OpError;
use crate::arg_check::ArgCheck;
use crate::device::dry;
use crate::host_table::HostTable;
use candle_core::{DType, Device, Tensor};
use std::ops::{Deref, Range};
use std::sync::{Arc, OnceLock};

/// Token ids, for both directions. The first [`forward`](super::forward) on a device copies them, with the
/// plan of the backward pass. Creating the plan only in the backward pass would make the device wait for it.
///
/// Cloning copies pointers only.
#[derive(Debug, Clone)]
pub struct Ids {
    host: HostTable<u32>,
    /// Whether ids may be [`ELSEWHERE`].
    pub(super) is_slice: bool,
    on_device: Arc<OnceLock<DeviceIds>>,
}

impl Deref for Ids {
    type Target = HostTable<u32>;

    fn deref(&self) -> &HostTable<u32> {
        &self.host
    }
}

/// Ids and [`Plan`] on a device.
#[derive(Debug, Clone)]
pub(super) struct DeviceIds {
    /// The ids, followed by the tables of the plan, in one copy.
    pub(super) tables: Tensor,
    /// Offsets of the plan's tokens, segments and sums in `tables`.
    pub(super) tokens_at: usize,
    pub(super) segments_at: usize,
    pub(super) sums_at: usize,
    pub(super) segments: usize,
    pub(super) sums: usize,
    /// Number of rows of partial sums.
    pub(super) partials: usize,
}

impl Ids {
    /// Creates ids on the host; a slice is copied.
    pub fn new(ids: impl Into<Arc<[u32]>>) -> Self {
        Self { host: HostTable::new(ids), is_slice: false, on_device: Arc::default() }
    }

    /// Creates the ids of a slice, the rows `rows` of a table of `vocab_size` rows. A token whose id is in another slice gets zeros, and
    /// has no gradient.
    ///
    /// # Errors
    /// An id that is not below `vocab_size`.
    pub fn in_slice(ids: &[u32], vocab_size: usize, rows: &Range<usize>) -> Result<Self, OpError> {
        check_ids(ArgCheck::new("embedding::forward"), ids, vocab_size)?;
        let in_slice = |id: &u32| match rows.contains(&(*id as usize)) {
            true => *id - rows.start as u32,
            false => ELSEWHERE,
        };
        Ok(Self { is_slice: true, ..Self::new(ids.iter().map(in_slice).collect::<Vec<_>>()) })
    }

    /// Ids of a [dry run](dry): only their number.
    pub fn dry(len: usize) -> Self {
        Self { host: HostTable::dry(len), is_slice: false, on_device: Arc::default() }
    }

    /// The ids on `device`.
    pub(super) fn on(&self, device: &Device) -> candle_core::Result<DeviceIds> {
        match self.on_device.get() {
            Some(known) if known.tables.device().same_device(device) => return Ok(known.clone()),
            _ => {}
        }
        let made = match dry::is_dry() {
            true => DeviceIds::dry(self.len(), device)?,
            false => DeviceIds::new(self, device)?,
        };
        // Those of another device may be cached already: these are then not cached.
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

    /// For ids without values: ids, tokens, and a segment of four values each, as if all ids differed.
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
