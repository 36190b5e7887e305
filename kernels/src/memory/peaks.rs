//! Memory peaks of consecutive sections of a thread's work.

use super::{ByCategory, Category, PEAK, PEAK_BYTES, peak_by_category, peak_bytes, reset_peak};
use std::cell::Cell;

/// A memory peak of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Peak {
    /// Total bytes.
    pub bytes: u64,
    /// Bytes by category.
    pub by_category: ByCategory,
}

/// Divides a thread's work into sections and returns the memory peak of each. Nothing is sampled: the
/// allocator records every new maximum. Dropping it restores [`peak_bytes`] as if it had not existed.
///
/// One per thread, and not while a [`PeakMeter`](super::PeakMeter) is active.
///
/// ```
/// # use ulysses_kernels::memory::{CountingAllocator, Peaks, peak_bytes};
/// # #[global_allocator]
/// # static ALLOCATOR: CountingAllocator<std::alloc::System> = CountingAllocator(std::alloc::System);
/// let mut peaks = Peaks::start();
/// drop(vec![0_u8; 2000]);
/// let first = peaks.cut();
/// let kept = vec![0_u8; 1000];
/// let second = peaks.cut();
/// assert_eq!(first.bytes, second.bytes + 1000);
/// drop((peaks, kept));
/// assert_eq!(peak_bytes() as u64, first.bytes);
/// ```
#[derive(Debug)]
pub struct Peaks {
    /// The peak before the current section.
    before: Exact,
}

/// A peak as the allocator counts it; negative if another thread's memory was freed.
#[derive(Debug, Clone, Copy)]
struct Exact {
    bytes: i64,
    by_category: [i64; Category::ALL.len()],
}

impl Exact {
    fn now() -> Self {
        Self { bytes: peak_bytes(), by_category: PEAK.with(|peak| peak.each_ref().map(Cell::get)) }
    }
}

impl Peaks {
    /// Starts the first section.
    pub fn start() -> Self {
        let before = Exact::now();
        reset_peak();
        Self { before }
    }

    /// Ends a section and starts the next. Returns the peak of the ended section, including what was
    /// allocated before it.
    pub fn cut(&mut self) -> Peak {
        let peak = Peak { bytes: u64::try_from(peak_bytes()).unwrap_or(0), by_category: peak_by_category() };
        self.keep_larger();
        reset_peak();
        peak
    }

    fn keep_larger(&mut self) {
        // Of equal peaks the earlier one, as in the allocator.
        if peak_bytes() > self.before.bytes {
            self.before = Exact::now();
        }
    }
}

impl Drop for Peaks {
    fn drop(&mut self) {
        self.keep_larger();
        PEAK_BYTES.set(self.before.bytes);
        PEAK.with(|peak| peak.iter().zip(self.before.by_category).for_each(|(peak, bytes)| peak.set(bytes)));
    }
}
