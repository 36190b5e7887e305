//! Extents for tensors, whose sizes repeat from layer to layer and from step to step.

use crate::device::dry;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The extent of one tensor. Dropping it frees it.
#[derive(Debug)]
pub struct Extent {
    pub(super) offset: u64,
    pub(super) bytes: u64,
    extents: Arc<Mutex<Extents>>,
}

/// Consecutive bytes of an extent.
#[derive(Debug)]
pub struct ExtentSlice<'a> {
    pub(super) extent: &'a Extent,
    pub(super) bytes: Range<usize>,
}

/// All extents of a store. Free ones retain their storage for the next tensor of the same size.
#[derive(Debug, Default)]
pub(super) struct Extents {
    end: u64,
    /// Number of extents in use.
    live: usize,
    /// Offsets of free extents by their sizes.
    free: HashMap<u64, Vec<u64>>,
}

impl Extents {
    fn reserve(&mut self, bytes: u64) -> u64 {
        self.live += 1;
        self.free.get_mut(&bytes).and_then(Vec::pop).unwrap_or_else(|| {
            dry::report_offloaded(bytes as i64);
            let offset = self.end;
            // Even an empty tensor has an extent of its own, by which stores identify it.
            self.end += bytes.max(1);
            offset
        })
    }

    /// Forgets the free extents, whose storage is to be freed, and returns their offsets.
    pub(super) fn forget_free(&mut self) -> Vec<u64> {
        let mut offsets = Vec::new();
        for (bytes, free) in self.free.drain() {
            dry::report_offloaded(-((bytes * free.len() as u64) as i64));
            offsets.extend(free);
        }
        if self.live == 0 {
            // So that a file does not grow.
            self.end = 0;
        }
        offsets
    }
}

impl Drop for Extents {
    fn drop(&mut self) {
        self.forget_free();
    }
}

impl Extent {
    /// Returns a free extent of this size. A pending copy from it completes first, since copies run in the
    /// order in which they were started.
    pub(super) fn reserve(extents: &Arc<Mutex<Extents>>, bytes: usize) -> Self {
        let bytes = bytes as u64;
        let offset = extents.lock().reserve(bytes);
        Self { offset, bytes, extents: extents.clone() }
    }

    /// The whole extent.
    #[must_use]
    pub fn whole(&self) -> ExtentSlice<'_> {
        self.slice(0..self.bytes as usize)
    }

    /// A range of its bytes, which must lie in it.
    #[must_use]
    pub fn slice(&self, bytes: Range<usize>) -> ExtentSlice<'_> {
        assert!(bytes.end as u64 <= self.bytes, "bytes {bytes:?} of an extent of {}", self.bytes);
        ExtentSlice { extent: self, bytes }
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let mut all = self.extents.lock();
        all.live -= 1;
        all.free.entry(self.bytes).or_default().push(self.offset);
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
    fn forgotten_extents_are_not_reused_and_their_space_is_once_none_is_in_use() {
        let extents: Arc<Mutex<Extents>> = Arc::default();
        let [first, other] = [Extent::reserve(&extents, 12), Extent::reserve(&extents, 16)];
        drop(first);
        assert_eq!(extents.lock().forget_free(), [0]);
        assert_eq!(Extent::reserve(&extents, 12).offset, 28, "after the extent in use");
        drop(other);
        let mut forgotten = extents.lock().forget_free();
        forgotten.sort_unstable();
        assert_eq!(forgotten, [12, 28]);
        assert_eq!(Extent::reserve(&extents, 8).offset, 0);
    }

    #[test]
    fn empty_extents_are_distinct() {
        let extents = Arc::default();
        let places = [0, 0, 8].map(|bytes| Extent::reserve(&extents, bytes));
        assert_eq!(places.each_ref().map(|place| place.offset), [0, 1, 2]);
    }
}
