//! Memory counters per thread, and a count of large allocations.
//!
//! A rank of the thread backend is one OS thread, so a rank's memory is its thread's. Allocations of the
//! other threads in its pool count as theirs. Blocks from 16 KiB on are also counted by category
//! ([`with_category`]). Counting costs a few additions per allocation, and only in programs that install the
//! allocator:
//!
//! ```
//! use ulysses_kernels::memory::CountingAllocator;
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator<std::alloc::System> = CountingAllocator(std::alloc::System);
//!
//! let meter = ulysses_kernels::memory::AllocationMeter::start();
//! let buffer = vec![0_u8; 1000];
//! assert_eq!(meter.bytes(), 1000);
//! drop(buffer);
//! assert_eq!(meter.bytes(), 0);
//!
//! use ulysses_kernels::memory::{Category, with_category, live_by_category};
//! let gradients = with_category(Category::Gradients, || vec![0_f32; 10_000]);
//! assert_eq!(live_by_category().gradients, 40_000);
//! # drop(gradients);
//! ```

mod blocks;
mod category;
mod peaks;

pub use category::{ByCategory, Category, current, with_category, with_default_category};
pub use peaks::{Peak, Peaks};

use crate::device::dry;
use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Allocations of at least this size are large.
pub const LARGE_BYTES: usize = 2 << 20;

/// Large allocations of all threads.
static LARGE_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

use blocks::SMALLEST;

thread_local! {
    /// Bytes that this thread allocated minus bytes that it freed. Constant initialization and no destructor:
    /// the allocator may use it at any time in a thread's life.
    static LIVE_BYTES: Cell<i64> = const { Cell::new(0) };
    /// The same for real allocations within a dry run.
    static DRY_BYTES: Cell<i64> = const { Cell::new(0) };
    /// Peak of `LIVE_BYTES` since [`reset_peak`].
    static PEAK_BYTES: Cell<i64> = const { Cell::new(0) };
    /// Both by category.
    static LIVE: Counts = const { [const { Cell::new(0) }; Category::ALL.len()] };
    static PEAK: Counts = const { [const { Cell::new(0) }; Category::ALL.len()] };
}

type Counts = [Cell<i64>; Category::ALL.len()];

fn values(counts: &Counts) -> ByCategory {
    ByCategory::from_counts(counts.each_ref().map(Cell::get))
}

/// Bytes that this thread has allocated and not freed. Zero or meaningless unless the program's global
/// allocator is a [`CountingAllocator`].
pub fn live_bytes() -> i64 {
    LIVE_BYTES.get()
}

/// Peak of this thread's [`live_bytes`] since its start or [`reset_peak`].
pub fn peak_bytes() -> i64 {
    PEAK_BYTES.get()
}

/// [`live_bytes`] by category.
pub fn live_by_category() -> ByCategory {
    LIVE.with(values)
}

/// [`peak_bytes`] by category: the categories at the time of the peak.
pub fn peak_by_category() -> ByCategory {
    PEAK.with(values)
}

/// Resets this thread's peak to its current bytes.
pub fn reset_peak() {
    PEAK_BYTES.set(LIVE_BYTES.get());
    record_peak();
}

fn record_peak() {
    LIVE.with(|live| PEAK.with(|peak| peak.iter().zip(live).for_each(|(peak, live)| peak.set(live.get()))));
}

/// Number of allocations of at least [`LARGE_BYTES`] by all threads of the program. Zero unless the program's
/// global allocator is a [`CountingAllocator`].
pub fn large_allocations() -> u64 {
    LARGE_ALLOCATIONS.load(Ordering::Relaxed)
}

/// Measures the bytes that a piece of code allocates and does not free.
#[derive(Debug)]
pub struct AllocationMeter {
    start: i64,
}

impl AllocationMeter {
    /// Starts at the current bytes.
    pub fn start() -> Self {
        Self { start: live_bytes() }
    }

    /// Bytes of this thread above those at the start; zero if below.
    pub fn bytes(&self) -> u64 {
        u64::try_from(live_bytes() - self.start).unwrap_or(0)
    }
}

/// Measures the memory peak of a piece of code. One per thread: starting another ends the first.
#[derive(Debug)]
pub struct PeakMeter {
    start: i64,
}

impl PeakMeter {
    /// Starts at the current bytes.
    pub fn start() -> Self {
        reset_peak();
        Self { start: live_bytes() }
    }

    /// Peak bytes of this thread since the start, above those at the start.
    pub fn bytes(&self) -> u64 {
        u64::try_from(peak_bytes() - self.start).unwrap_or(0)
    }
}

/// Wraps an allocator and counts the bytes of every thread.
#[derive(Debug, Default)]
pub struct CountingAllocator<A>(pub A);

pub(crate) fn count(category: Category, bytes: i64) {
    let live = LIVE_BYTES.get() + bytes;
    LIVE_BYTES.set(live);
    LIVE.with(|of| of[category as usize].set(of[category as usize].get() + bytes));
    if live > PEAK_BYTES.get() {
        PEAK_BYTES.set(live);
        record_peak();
    }
}

/// Sets this thread's counters to zero until it is dropped. Dropping restores them, plus the real allocations
/// of a dry run that are still live.
pub(crate) struct FreshCounters {
    bytes: [i64; 2],
    by_category: [[i64; Category::ALL.len()]; 2],
}

impl FreshCounters {
    pub(crate) fn start() -> Self {
        let replaced = |counts: &Counts| counts.each_ref().map(|count| count.replace(0));
        let by_category = [LIVE.with(replaced), PEAK.with(replaced)];
        Self { bytes: [LIVE_BYTES.replace(0), PEAK_BYTES.replace(0)], by_category }
    }
}

impl Drop for FreshCounters {
    fn drop(&mut self) {
        [&LIVE_BYTES, &PEAK_BYTES]
            .into_iter()
            .zip(self.bytes)
            .for_each(|(counter, bytes)| counter.set(bytes));
        for (counters, values) in [&LIVE, &PEAK].into_iter().zip(self.by_category) {
            counters.with(|counts| counts.iter().zip(values).for_each(|(count, value)| count.set(value)));
        }
        count(Category::Other, DRY_BYTES.replace(0));
    }
}

fn count_large(bytes: usize) {
    if bytes >= LARGE_BYTES {
        LARGE_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts an allocated block as `category`.
fn enter(block: *mut u8, size: usize, category: Category) {
    if block.is_null() {
        return;
    }
    // A dry thread counts what it would allocate.
    if dry::is_dry() {
        DRY_BYTES.set(DRY_BYTES.get() + size as i64);
    } else {
        let category = if size < SMALLEST { Category::Other } else { blocks::enter(block.addr(), category) };
        count(category, size as i64);
    }
}

/// Counts a block that is about to be freed, and returns its category. After the block is freed, another
/// thread may get its address.
fn leave(block: *mut u8, size: usize) -> Category {
    let category = if size < SMALLEST { Category::Other } else { blocks::leave(block.addr()) };
    match dry::is_dry() {
        true => DRY_BYTES.set(DRY_BYTES.get() - size as i64),
        false => count(category, -(size as i64)),
    }
    category
}

// SAFETY: every method forwards to the inner allocator with the arguments it got, and
// returns what that returns; counting touches thread-local integers and a table of atomics only and cannot unwind.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_large(layout.size());
        // SAFETY: the caller's obligations are those of the inner allocator.
        let block = unsafe { self.0.alloc(layout) };
        enter(block, layout.size(), category::current());
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_large(layout.size());
        // SAFETY: as above.
        let block = unsafe { self.0.alloc_zeroed(layout) };
        enter(block, layout.size(), category::current());
        block
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        leave(ptr, layout.size());
        // SAFETY: as above.
        unsafe { self.0.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count_large(new_size);
        let before = leave(ptr, layout.size());
        let category = if layout.size() < SMALLEST { category::current() } else { before };
        // SAFETY: as above.
        let block = unsafe { self.0.realloc(ptr, layout, new_size) };
        match block.is_null() {
            // The old block stays.
            true => enter(ptr, layout.size(), before),
            false => enter(block, new_size, category),
        }
        block
    }
}
