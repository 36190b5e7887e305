//! The most that a thread holds in each of several pieces of work that follow each other.

use super::{ByCategory, Category, PEAK, PEAK_BYTES, peak_by_category, peak_bytes, reset_peak};
use std::cell::Cell;

/// The most that a thread held at a time, and what for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Peak {
    /// Bytes.
    pub bytes: u64,
    /// What they were for.
    pub by_category: ByCategory,
}

/// Cuts the time of a thread into pieces and tells of each the most that was held in it. Nothing is sampled: the allocator
/// notes every new largest, so no moment is missed. When it is dropped, [`peak_bytes`] is what it would be without it.
///
/// A thread has one at a time, and none while a [`PeakMeter`](super::PeakMeter) measures.
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
    /// The largest before the piece that goes on.
    before: Exact,
}

/// A peak as the allocator counts it: less than nothing where another thread's memory was freed.
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
    /// The first piece begins.
    pub fn start() -> Self {
        let before = Exact::now();
        reset_peak();
        Self { before }
    }

    /// Ends a piece and begins the next: the most that was held in it, what was there when it began included.
    pub fn cut(&mut self) -> Peak {
        let peak = Peak { bytes: u64::try_from(peak_bytes()).unwrap_or(0), by_category: peak_by_category() };
        self.keep_larger();
        reset_peak();
        peak
    }

    fn keep_larger(&mut self) {
        // Of equal ones the earlier, as the allocator does.
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
