//! Extents for tensors, whose sizes repeat from layer to layer and from step to step.

use crate::device::dry;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// The extent of one tensor. Dropping it frees it.
#[derive(Debug)]
pub struct Extent {
    pub(super) offset: u64,
    pub(super) bytes: u64,
    extents: Arc<Mutex<Extents>>,
}

/// All extents of a store.
#[derive(Debug, Default)]
pub(super) struct Extents {
    end: u64,
    free: HashMap<u64, Vec<u64>>,
}

impl Extent {
    /// Returns a free extent of this size. A pending copy from it completes first, since copies run in the
    /// order in which they were started.
    pub(super) fn reserve(extents: &Arc<Mutex<Extents>>, bytes: usize) -> Self {
        let bytes = bytes as u64;
        dry::report_offloaded(bytes as i64);
        let offset = {
            let mut all = extents.lock();
            all.free.get_mut(&bytes).and_then(Vec::pop).unwrap_or_else(|| {
                let offset = all.end;
                // Even an empty tensor has an extent of its own, by which stores identify it.
                all.end += bytes.max(1);
                offset
            })
        };
        Self { offset, bytes, extents: extents.clone() }
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        dry::report_offloaded(-(self.bytes as i64));
        self.extents.lock().free.entry(self.bytes).or_default().push(self.offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_extent_is_reused() {
        let extents = Arc::default();
        let [first, other] = [Extent::reserve(&extents, 12), Extent::reserve(&extents, 16)];
        let offset = first.offset;
        drop(first);
        assert_ne!(Extent::reserve(&extents, 16).offset, offset, "of another size");
        assert_eq!(Extent::reserve(&extents, 12).offset, offset);
        assert_eq!(other.offset, 12);
    }

    #[test]
    fn empty_extents_are_distinct() {
        let extents = Arc::default();
        let places = [0, 0, 8].map(|bytes| Extent::reserve(&extents, bytes));
        assert_eq!(places.each_ref().map(|place| place.offset), [0, 1, 2]);
    }
}
